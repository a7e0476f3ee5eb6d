"""The character tokenizer of the tiny model: 32 tokens, ids fixed for good.

A `tokenizers` word-level model over single characters, so that transformers and vLLM both load it as a fast tokenizer.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

EOS, PAD, UNK = "<eos>", "<pad>", "<unk>"
VOCABULARY = (EOS, PAD, UNK, *"0123456789", *"+-*/=", *"(),", *"maxin", *" .?<>%")
EOS_ID, PAD_ID, UNK_ID = 0, 1, 2
# The last user message is the prompt: the model knows no roles.
CHAT_TEMPLATE = "{{ messages[-1]['content'] }}"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A fresh tokenizer: one token per character, nothing added at either end, no white-space clean-up."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token=UNK))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNK,
        clean_up_tokenization_spaces=False,
        model_max_length=256,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def encode(text: str) -> list[int]:
    """Ids of the characters of `text`. Raises KeyError for a character outside the vocabulary."""
    return [_IDS[character] for character in text]


def save_tokenizer(folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template into `folder`."""
    make_tokenizer().save_pretrained(folder)


_IDS = {token: i for i, token in enumerate(VOCABULARY)}
