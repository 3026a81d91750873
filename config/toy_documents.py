# Passages in miniature: 1 to 8 lines of prose, code, JSON, CSV, logs and words; tested on up to eight times as many.
#   python train.py config/toy_finetune.py config/finetune_recipe.py config/toy_documents.py --out_dir=out/documents
#   python eval.py --runs=out/documents --tasks=prose,csv --lengths=8,16,32,64 --block_size=20000
# `make documents` does that for several encodings; the first command needs --init_from=RUN, too.

train_data = "data/toy/train"
text_task = "documents"
text_max_length = 8  # lines
batch_size = 16
max_steps = 450
