"""BERT for pre-training: transformers' `BertForPreTraining` as it comes, with its loss, as Varuna expects of a model.

Shapes: B examples, T tokens, K predictions of an example at most, H width, V words of the vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BertConfig, BertForPreTraining

NOT_PREDICTED = -1
"""The label of a token that is not predicted, as in NVIDIA's recipe."""

VOCABULARY_MULTIPLE = 8
"""The vocabulary is padded to a multiple of this number of rows, as in NVIDIA's recipe: tensor cores need it."""


class Scores(NamedTuple):
    """The heads' outputs, before any softmax."""

    words: Tensor
    """(B, K, V): the words at the masked places, in their order; what is beyond an example's own has no meaning."""
    labels: Tensor
    """(B, K) int64: the right words; NOT_PREDICTED beyond an example's own."""
    next_sentence: Tensor
    """(B, 2): column 0 when the second sentence follows the first, column 1 when it is a random one."""


class BertPretraining(nn.Module):
    """Masked words and next sentence. `forward` returns the mean loss over the examples.

    It has no CutPoints: Varuna finds them, one behind each layer of the encoder. The projection onto the vocabulary,
    the largest product of small models, is done at the masked places alone.
    """

    def __init__(self, config: BertConfig, max_predictions: int) -> None:
        super().__init__()
        self.model = BertForPreTraining(config)
        self.max_predictions = max_predictions

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor,
        attention_mask: Tensor,
        masked_lm_labels: Tensor,
        next_sentence_labels: Tensor,
    ) -> Tensor:
        """(B, T) four times and (B,), int64, to the loss in nats: of a masked word plus of the next sentence.

        The loss of the masked words is averaged over each example's own, then over examples. An average over all masked
        words of whatever is computed at once, as in NVIDIA's recipe, would weigh them by the micro-batch they are in.
        """
        scores = self.scores(input_ids, token_type_ids, attention_mask, masked_lm_labels)
        of_words = F.cross_entropy(
            scores.words.flatten(0, 1), scores.labels.flatten(), ignore_index=NOT_PREDICTED, reduction="none"
        ).view_as(scores.labels)
        predicted = (scores.labels != NOT_PREDICTED).sum(1).clamp(min=1)
        masked_lm_loss = (of_words.sum(1) / predicted).mean()
        return masked_lm_loss + F.cross_entropy(scores.next_sentence, next_sentence_labels)

    def scores(
        self, input_ids: Tensor, token_type_ids: Tensor, attention_mask: Tensor, masked_lm_labels: Tensor
    ) -> Scores:
        """The shapes of `forward`."""
        encoded = self.model.bert(input_ids, token_type_ids=token_type_ids, attention_mask=attention_mask)
        places, labels = masked_places(masked_lm_labels, self.max_predictions)
        width = encoded.last_hidden_state.shape[-1]
        masked = encoded.last_hidden_state.gather(1, places.unsqueeze(-1).expand(-1, -1, width))
        words, next_sentence = self.model.cls(masked, encoded.pooler_output)
        return Scores(words, labels, next_sentence)


def masked_places(labels: Tensor, max_predictions: int) -> tuple[Tensor, Tensor]:
    """Where `labels` (B, T) has words to predict, first ones first, and these words: (B, K) both.

    K is the same for every batch, so sizes do not depend on values. Examples of fewer masked words are filled up
    with places that are not to be predicted.
    """
    tokens = labels.shape[1]
    order = torch.arange(tokens, 0, -1, device=labels.device) + (labels != NOT_PREDICTED) * tokens
    places = order.topk(min(max_predictions, tokens), dim=1).indices
    return places, labels.gather(1, places)


def read_config(path: str | Path, vocabulary: int | None = None) -> BertConfig:
    """The model's sizes from a JSON file with NVIDIA's (and transformers') field names, its vocabulary padded.

    `vocabulary`: the words that the data has, if it says. Raises ValueError when the file has fewer.
    """
    config: BertConfig = BertConfig.from_json_file(str(path))
    if vocabulary is not None and config.vocab_size < vocabulary:
        raise ValueError(
            f"{path} has a vocab_size of {config.vocab_size}, but the data was prepared with {vocabulary} words: "
            "prepare it with a smaller --vocab-size, or raise the file's"
        )
    config.vocab_size += -config.vocab_size % VOCABULARY_MULTIPLE
    return config


def load_pretrained(weights: str | Path, config: BertConfig) -> BertForPreTraining:
    """The plain transformers model with what `varuna export` wrote: for fine-tuning, `save_pretrained`, ...

    Raises RuntimeError when the file is of another model, or of other sizes.
    """
    model = BertPretraining(config, max_predictions=1)
    model.load_state_dict(safetensors.torch.load_file(str(weights)), strict=True)
    return model.model
