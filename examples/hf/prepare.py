"""Write a new model's configuration and tokenizer into a folder: what `varuna export --hf --tokenizer` copies.

python examples/hf/prepare.py --model_name_or_path llama --output_dir my-llama
"""

from __future__ import annotations

import sys

from arguments import parse
from models import load_config
from text import load_tokenizer


def main() -> None:
    arguments = parse(__doc__)
    if arguments.output_dir is None:
        sys.exit("where to? Give --output_dir")
    tokenizer = load_tokenizer(arguments)
    tokenizer.save_pretrained(arguments.output_dir)
    load_config(arguments, tokenizer).save_pretrained(arguments.output_dir)


if __name__ == "__main__":
    main()
