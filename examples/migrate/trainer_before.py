"""Hugging Face Trainer: python trainer_before.py"""

from pathlib import Path

from torch.utils.data import default_collate
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from task import LENGTH, TOKENS, load_datasets, parse_arguments


def build_model() -> BertForSequenceClassification:
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(vocab_size=TOKENS, max_position_embeddings=LENGTH, num_labels=TOKENS, **sizes, **dropout)
    return BertForSequenceClassification(config)


def collate(examples):
    batch = default_collate(examples)
    return {"input_ids": batch["tokens"], "labels": batch["labels"]}


class Printing(TrainerCallback):
    def on_log(self, arguments, state, control, logs, **others):
        for name, label in (("loss", "loss"), ("eval_loss", "validation")):
            if name in logs:
                print(f"step {state.global_step} {label} {logs[name]:.6f}", flush=True)


def main() -> None:
    arguments = parse_arguments(__doc__)
    set_seed(0)
    train, validation = load_datasets()
    trainer = Trainer(
        model=build_model(),
        args=TrainingArguments(
            output_dir=arguments.checkpoint,
            max_steps=arguments.steps,
            per_device_train_batch_size=16,
            learning_rate=3e-3,
            weight_decay=0.01,
            max_grad_norm=1.0,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=10,
            train_sampling_strategy="sequential" if arguments.in_order else "random",
            bf16=arguments.bf16,
            eval_strategy="steps",
            eval_steps=8,
            per_device_eval_batch_size=16,
            save_steps=50,
            logging_steps=1,
            logging_nan_inf_filter=False,
            disable_tqdm=True,
            remove_unused_columns=False,
            report_to="none",
        ),
        data_collator=collate,
        train_dataset=train,
        eval_dataset=validation,
        callbacks=[Printing()],
    )
    trainer.train(resume_from_checkpoint=any(Path(arguments.checkpoint).glob("checkpoint-*")))


if __name__ == "__main__":
    main()
