# Every encoding and option, one and four layers, the toy's data and budget (Auto-2D: that of config/toy_auto.py).
#   python -m scripts.sweep config/sweep_encodings.py
# With one layer rnope is rope, and so is h-rope, with uniform frequencies.

_rows = {
    "rope": "--pos_encoding=rope --freqs=geometric",
    "alibi": "--pos_encoding=alibi",
    "nope": "--pos_encoding=nope",
    "rnope": "--pos_encoding=rnope --freqs=geometric",
    "h-rope": "--pos_encoding=h-rope",
    "bipe": "--pos_encoding=bipe --freqs=geometric",
    "hirope": "--pos_encoding=hirope --freqs=geometric",
    "segatron": "--pos_encoding=segatron --freqs=geometric",
    "bipe-uniform": "--pos_encoding=bipe",
    "hirope-uniform": "--pos_encoding=hirope",
    "segatron-uniform": "--pos_encoding=segatron",
    "2d-rope-geometric": "--freqs=geometric",
    "2d-rope-mixed": "--freqs=mixed",
    "2d-rope-uniform": "",
    "2d-rope-uniform-log_n": "--logit_scale=log_n",
    "2d-rope-uniform-half": "--rotary_fraction=0.5",
    "2d-rope-learned": "--freqs=geometric --freqs_learned=True",
    "auto-sigmoid": "config/toy_auto.py --separator=<n> --grid_steps=0 --noise=0.1 --auto_gate=sigmoid --auto_bias=2 "
    "--gate_lr_scale=30",
    "auto-saturating": "config/toy_auto.py --separator=<n>",
}
_sizes = {1: "", 4: "--n_layer=4"}
runs = tuple(
    f"{_name}-{_layers} config/toy_copy.py {_flags} {_size}"
    for _layers, _size in _sizes.items()
    for _name, _flags in _rows.items()
    if _layers > 1 or _name not in ("rnope", "h-rope")
)
lengths = (20, 40, 80, 160, 320, 640, 1280, 2560, 5120)
samples = (50, 20, 20, 10, 10, 10, 4, 2, 1)
out_dir = "out/sweep_encodings"
