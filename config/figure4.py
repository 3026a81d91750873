# The paper's Figure 4 by anyone: every encoding with one, four and twelve layers, trained on strings of 1 to 25 tokens
# with the same budget (600 steps; Auto-2D 250 more, for its grid), tested on intervals that double from 1-25.
#   make figure4      # hours; goes on where it stopped
# 2d-rope is the rule of line breaks; frequencies are geometric where nothing is said, as in the paper.

_encodings = {
    "rope": "--pos_encoding=rope",
    "alibi": "--pos_encoding=alibi",
    "nope": "--pos_encoding=nope",
    "rnope": "--pos_encoding=rnope",
    "h-rope": "--pos_encoding=h-rope",
    "bipe": "--pos_encoding=bipe",
    "hirope": "--pos_encoding=hirope",
    "segatron": "--pos_encoding=segatron",
    "bipe-uniform": "--pos_encoding=bipe --freqs=uniform",
    "hirope-uniform": "--pos_encoding=hirope --freqs=uniform",
    "segatron-uniform": "--pos_encoding=segatron --freqs=uniform",
    "2d-rope": "",
    "2d-rope-uniform": "--freqs=uniform",
    "auto-2d-rope-uniform": "--pos_encoding=auto-2d-rope --freqs=uniform --grid_steps=250 --max_steps=850 --noise=0.3",
}
_common = "config/toy_copy.py config/toy_12layer.py --max_length=25 --freqs=geometric"
_layers = {
    "1-layer": "--n_layer=1 --learning_rate=2e-3",
    "4-layers": "--n_layer=4 --learning_rate=2e-3",
    "12-layers": "",
}
runs = tuple(
    f"{_name}/{_group} {_common} {_flags} {_size}"
    for _group, _size in _layers.items()
    for _name, _flags in _encodings.items()
)
seeds = (0, 1, 2, 3)
tasks = ("imbalanced", "recursive-flip", "uniform")
lengths = (
    "1-25",
    "26-50",
    "51-100",
    "101-200",
    "201-400",
    "401-800",
    "801-1600",
    "1601-3200",
    "3201-6400",
    "6401-12800",
)
samples = (100, 50, 50, 20, 20, 10, 5, 3, 2, 1)
stop = "zero"
out_dir = "out/figure4"
