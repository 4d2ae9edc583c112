"""How well an exported BERT predicts masked words and next sentences, on examples that it was not trained on.

varuna export /tmp/varuna-bert/checkpoints --out model.safetensors
python examples/bert/evaluate.py --weights model.safetensors --input_dir … --config_file …
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset

from model import NOT_PREDICTED, BertPretraining, read_config
from pretraining_data import PretrainingDataset


@torch.no_grad()
def evaluate(model: BertPretraining, batches: Iterable[dict[str, Tensor]]) -> dict[str, float]:
    """Means over all masked words, and over all pairs of sentences."""
    model.eval()
    totals = {"masked_lm_loss": 0.0, "masked_lm_accuracy": 0.0, "next_sentence_accuracy": 0.0}
    words = pairs = 0
    for batch in batches:
        next_sentence = batch.pop("next_sentence_labels")
        scores = model.scores(**batch)
        there = scores.labels != NOT_PREDICTED
        predictions, right = scores.words[there], scores.labels[there]
        totals["masked_lm_loss"] += float(F.cross_entropy(predictions, right, reduction="sum"))
        totals["masked_lm_accuracy"] += int((predictions.argmax(1) == right).sum())
        totals["next_sentence_accuracy"] += int((scores.next_sentence.argmax(1) == next_sentence).sum())
        words, pairs = words + len(right), pairs + len(next_sentence)
    return {name: total / (pairs if name.startswith("next") else words) for name, total in totals.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True, help="what varuna export wrote")
    parser.add_argument("--input_dir", type=Path, required=True, help="folder of the .hdf5 files; test_… is taken")
    parser.add_argument("--config_file", type=Path, required=True)
    parser.add_argument("--max_predictions_per_seq", type=int, default=20)
    parser.add_argument("--examples", type=int, default=1000, help="at most so many")
    arguments = parser.parse_args()
    predictions = arguments.max_predictions_per_seq
    dataset = PretrainingDataset(arguments.input_dir, split="test", max_predictions_per_seq=predictions)
    model = BertPretraining(read_config(arguments.config_file, dataset.vocab_size), predictions)
    model.load_state_dict(safetensors.torch.load_file(str(arguments.weights)), strict=True)
    subset = Subset(dataset, range(min(arguments.examples, len(dataset))))
    for name, value in evaluate(model, DataLoader(subset, batch_size=32)).items():
        sys.stdout.write(f"{name} : {value:.4f}\n")


if __name__ == "__main__":
    main()
