"""Fine-tune a pre-trained BERT on a small task: which subject is a passage of Python's documentation about?

    varuna export bert-checkpoints --out bert.safetensors
    python examples/bert/finetune.py --model bert.safetensors --vocab_file bert-data/vocab.txt

It trains with Varuna, by hand as here or as the script of a job, or with --plain in a loop of PyTorch alone, and prints
the accuracy on passages from other modules. Without --model the weights are random, which shows what pre-training is
worth.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification

from arguments import FROM_LAUNCHER
from corpus_python import python_documents
from finetune_task import SUBJECTS, encode, make_task
from model import load_pretrained, read_config
from schedule import set_learning_rate
from varuna import Varuna
from varuna.data import Batches
from vocabulary import WordPieces, read_vocabulary

WEIGHT_DECAY = 0.01
WARMUP = 0.1


class PassageClassifier(nn.Module):
    """BERT with a head for `subjects`; its mean loss in training, its share of errors in evaluation.

    So `Varuna.evaluate`, which returns what the model does, counts errors, over however many stages.
    """

    def __init__(self, model: BertForSequenceClassification) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        """(B, T) twice and (B,), int64, to a scalar."""
        logits = self.model(input_ids=input_ids, attention_mask=attention_mask).logits
        if self.training:
            return F.cross_entropy(logits, labels)
        return (logits.argmax(dim=-1) != labels).float().mean()


class Passages(Dataset[dict[str, Tensor]]):
    """Encoded passages one by one."""

    def __init__(self, encoded: dict[str, Tensor]) -> None:
        self.encoded = encoded

    def __len__(self) -> int:
        return len(self.encoded["labels"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: value[index] for name, value in self.encoded.items()}

    def first(self, size: int) -> dict[str, Tensor]:
        """`size` of them as a batch, for the dry run and the calibration."""
        rows = torch.arange(size) % len(self)
        return {name: value[rows] for name, value in self.encoded.items()}


def load_task(arguments: argparse.Namespace) -> tuple[Passages, Passages]:
    """The training set and the test set. Raises ValueError for a vocabulary that cannot be read."""
    vocabulary = read_vocabulary(arguments.vocab_file)
    pieces = WordPieces(vocabulary, lower_case=not arguments.cased)
    training, test = make_task(
        python_documents(), labelled=arguments.labelled, tested=arguments.tested, seed=arguments.task_seed
    )
    encoded = (encode(passages, vocabulary, pieces, arguments.max_seq_length) for passages in (training, test))
    learnt, tested = map(Passages, encoded)
    return learnt, tested


def build_classifier(arguments: argparse.Namespace) -> PassageClassifier:
    """With the weights of --model, a file of `varuna export` or a folder that `from_pretrained` loads, and a new head.

    Raises ValueError for weights that are not there, not of --config_file's sizes, or of another kind of model.
    """
    torch.manual_seed(arguments.seed)
    path: Path | None = arguments.model
    if path is not None and not path.exists():
        raise ValueError(f"{path}: no such file or folder: `varuna export STORE --out {path}` makes one")
    is_folder = path is not None and path.is_dir()
    config = BertConfig.from_pretrained(path) if is_folder else read_config(arguments.config_file)
    config.num_labels = len(SUBJECTS)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = arguments.dropout
    classifier = BertForSequenceClassification(config)
    if path is not None:
        classifier.bert.load_state_dict(_encoder_of(path, config))
    return PassageClassifier(classifier)


def _encoder_of(path: Path, config: BertConfig) -> dict[str, Tensor]:
    """The weights of the encoder, without the heads of pre-training."""
    if path.is_dir():
        # A pair, with this option: its annotation says a model alone.
        loaded_and_report: Any = BertForSequenceClassification.from_pretrained(path, output_loading_info=True)
        loaded, report = loaded_and_report
        missing = [name for name in report["missing_keys"] if name.startswith("bert.")]
        if missing:
            raise ValueError(f"{path}: lacks {missing[0]} and {len(missing) - 1} more: it is no folder of a BERT")
        return dict(loaded.bert.state_dict())
    try:
        return dict(load_pretrained(path, config).bert.state_dict())
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{path}: is not of the model that --config_file describes: {reason} …") from None


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Up in a tenth of the steps, then straight down: a function of the step, as a resumed job needs it."""
    rising = max(1, round(WARMUP * steps))
    return peak * min(step / rising, (steps - step + 1) / (steps - rising + 1))


def main(words: list[str] | None = None) -> None:
    arguments = _parser().parse_args(words)
    try:
        learnt, test = load_task(arguments)
        classifier = build_classifier(arguments)
    except ValueError as error:
        sys.exit(f"finetune.py: {error}")
    steps = -(-arguments.epochs * len(learnt) // arguments.train_batch_size)
    begin = time.perf_counter()
    run = run_plain if arguments.plain else run_varuna
    loss, errors = run(classifier, learnt, test, steps, arguments)
    start = arguments.model or "random weights"
    print(
        f"accuracy {1 - errors:.3f} on {len(test)} passages, from {start}: {len(learnt)} passages of {len(SUBJECTS)} "
        f"subjects learnt in {steps} steps, last loss {loss:.4f}, seed {arguments.seed}, "
        f"{time.perf_counter() - begin:.1f} s"
    )


def run_plain(
    classifier: PassageClassifier, learnt: Passages, test: Passages, steps: int, arguments: argparse.Namespace
) -> tuple[float, float]:
    """In PyTorch alone: the last loss and the share of errors. --output_dir becomes a folder for `from_pretrained`."""
    optimizer = AdamW(classifier.parameters(), weight_decay=WEIGHT_DECAY)
    loss = torch.tensor(float("nan"))
    for step, batch in Batches(learnt, global_batch=arguments.train_batch_size, seed=arguments.seed, last_step=steps):
        set_learning_rate(optimizer, learning_rate(step, steps, arguments.learning_rate))
        optimizer.zero_grad()
        loss = classifier(**batch)
        loss.backward()
        optimizer.step()
    classifier.eval()
    with torch.no_grad():
        errors = float(classifier(**test.encoded))
    if arguments.output_dir:
        classifier.model.save_pretrained(arguments.output_dir)
    return loss.item(), errors


def run_varuna(
    classifier: PassageClassifier, learnt: Passages, test: Passages, steps: int, arguments: argparse.Namespace
) -> tuple[float, float]:
    """The same with Varuna, by hand or in a job, whose store or --output_dir gets a checkpoint."""
    model = Varuna(classifier, get_batch_fn=lambda size, device=None: learnt.first(size))
    optimizer = AdamW(model.parameters(), weight_decay=WEIGHT_DECAY)
    model.set_optimizer(optimizer)
    start = model.resume() if model.checkpoint_url else 0
    by_hand = None if model.checkpoint_url else arguments.train_batch_size  # under a manager, the job gives it
    loss = float("nan")
    batches = Batches(learnt, global_batch=by_hand, seed=arguments.seed, first_step=start + 1, last_step=steps)
    for step, batch in batches:
        set_learning_rate(optimizer, learning_rate(step, steps, arguments.learning_rate))
        loss, _overflow, _gradient_norm = model.step(batch)
    errors = model.evaluate(test.encoded)
    store = model.checkpoint_url or arguments.output_dir
    if store:
        model.checkpoint(store)
    return loss, errors


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    tiny = Path(__file__).parent / "configs" / "tiny.json"
    add("--model", type=Path, help="file of `varuna export`, or folder for from_pretrained (default: random weights)")
    add("--config_file", type=Path, default=tiny, help="sizes of the model of a file (default: configs/tiny.json)")
    add("--vocab_file", type=Path, required=True, help="the vocab.txt that the model was pre-trained with")
    add("--cased", action="store_true", help="the vocabulary is cased")
    add("--labelled", type=int, default=50, help="passages of each subject to learn from (default: 50)")
    add("--tested", type=int, default=100, help="passages of each subject to test with, at most (default: 100)")
    add("--task_seed", type=int, default=0, help="of the choice of modules and passages (default: 0)")
    add("--max_seq_length", type=int, default=64, help="tokens of a passage; longer ones are cut (default: 64)")
    add("--epochs", type=int, default=10, help="(default: 10)")
    add("--train_batch_size", type=int, default=16, help="over all GPUs (default: 16)")
    add("--learning_rate", type=float, default=5e-4, help="of AdamW, at its highest (default: 5e-4)")
    add("--dropout", type=float, default=0.1, help="(default: 0.1)")
    add("--seed", type=int, default=0, help="of the head, of random weights, and of the order (default: 0)")
    add("--plain", action="store_true", help="train in a loop of PyTorch alone, without Varuna")
    add("--output_dir", help="checkpoint of the result; with --plain, a folder for from_pretrained")
    for name in FROM_LAUNCHER:
        add(f"--{name}", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    main()
