"""Train a language model of transformers in plain PyTorch, in this process."""

from __future__ import annotations

from arguments import parse
from models import build_model, is_masked, load_config
from text import load_blocks, load_tokenizer
from trainer import Trainer


def main() -> None:
    arguments = parse(__doc__)
    tokenizer = load_tokenizer(arguments)
    config = load_config(arguments, tokenizer)
    train, evaluation = load_blocks(arguments, tokenizer, masked=is_masked(config))

    model = build_model(arguments, config)

    Trainer(model, arguments, tokenizer, train, evaluation).train()


if __name__ == "__main__":
    main()
