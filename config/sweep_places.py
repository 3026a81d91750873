# A copy that starts elsewhere than its source: one of several strings, from the middle, over several lines, twice.
#   python -m scripts.sweep config/sweep_places.py
# Trained on strings of 1 to 20 tokens, tested to 256 times that. Auto-2D finds its separators first, in 250 steps more.

_encodings = {
    "2d-rope": "",
    "h-rope": "--pos_encoding=h-rope",
    "auto-2d-rope": "--pos_encoding=auto-2d-rope --grid_steps=250 --max_steps=1750 --noise=0.3",
}
_sizes = {"1-layer": "", "4-layers": "--n_layer=4", "12-layers": "--n_layer=12 --mlp_dim=256 --learning_rate=1e-3"}
_copy = "config/toy_copy.py --max_steps=1500 --logit_scale=log_n"
runs = tuple(
    f"{_task}-{_encoding}/{_size} {_copy} --copy_task={_task} {_flags} {_layers}"
    for _task in ("select", "middle", "multiline", "twice")
    for _encoding, _flags in _encodings.items()
    for _size, _layers in _sizes.items()
    if (_encoding, _size) != ("h-rope", "1-layer")  # that is RoPE
)
tasks = ()  # the one that each is trained on
lengths = (20, 40, 80, 320, 1280, 5120)
samples = (50, 20, 20, 10, 4, 1)
stop = "zero"
out_dir = "out/sweep_places"
