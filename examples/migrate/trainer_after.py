"""Hugging Face Trainer, brought to Varuna: varuna submit job.yaml --set run="python trainer_after.py" --name trainer"""

import torch
from torch.utils.data import default_collate
from transformers import BertConfig, BertForSequenceClassification, get_scheduler, set_seed

from task import LENGTH, TOKENS, load_datasets, parse_arguments
from varuna import Varuna
from varuna.data import Batches

GLOBAL_BATCH = 16  # examples for an update; job.yaml says the same


def build_model() -> BertForSequenceClassification:
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(vocab_size=TOKENS, max_position_embeddings=LENGTH, num_labels=TOKENS, **sizes, **dropout)
    return BertForSequenceClassification(config)


def collate(examples):
    batch = default_collate(examples)
    return {"input_ids": batch["tokens"], "labels": batch["labels"]}


def main() -> None:
    arguments = parse_arguments(__doc__)
    set_seed(0)
    train, validation = load_datasets()
    model = Varuna(
        build_model(),
        get_batch_fn=collate([train[0], train[1]]),
        dtype=torch.bfloat16 if arguments.bf16 else None,
    )
    optimizer = torch.optim.AdamW(parameter_groups(model, weight_decay=0.01), lr=3e-3)
    model.set_optimizer(optimizer)
    scheduler = get_scheduler("constant_with_warmup", optimizer, num_warmup_steps=10)
    model.register_state("scheduler", scheduler)
    start = model.resume()

    batches = Batches(
        train,
        global_batch=GLOBAL_BATCH,
        collate=collate,
        shuffle=not arguments.in_order,
        first_step=start + 1,
        last_step=arguments.steps,
    )
    for step, batch in batches:
        loss, _overflow, _norm = model.step(batch, clip_grad_max_norm=1.0)
        scheduler.step()
        print(f"step {step} loss {loss:.6f}", flush=True)
        if step % 8 == 0:
            print(f"step {step} validation {evaluate(model, validation):.6f}", flush=True)
    if model.checkpoint_url:
        model.checkpoint()


def parameter_groups(model: Varuna, weight_decay: float):
    """As Trainer makes them: no decay for biases and norms."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def evaluate(model: Varuna, validation) -> float:
    batches = Batches(validation, global_batch=GLOBAL_BATCH, collate=collate, shuffle=False)
    rounds = len(validation) // GLOBAL_BATCH
    return sum(model.evaluate(batches.batch(index)) for index in range(1, rounds + 1)) / rounds


if __name__ == "__main__":
    main()
