"""Train a language model of transformers with Varuna: run by every worker, on any number of GPUs."""

from __future__ import annotations

from arguments import parse
from models import build_model, is_masked, load_config, weights_for_stages
from text import load_blocks, load_tokenizer
from trainer import Trainer
from varuna import Varuna


def main() -> None:
    arguments = parse(__doc__)
    tokenizer = load_tokenizer(arguments)
    config = load_config(arguments, tokenizer)
    train, evaluation = load_blocks(arguments, tokenizer, masked=is_masked(config))

    model = build_model(arguments, config)
    model = Varuna(model, get_batch_fn=train.example, weights=weights_for_stages(arguments))

    Trainer(model, arguments, tokenizer, train, evaluation).train()


if __name__ == "__main__":
    main()
