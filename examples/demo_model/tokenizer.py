"""Trains the demo model's byte-level BPE tokenizer of 8,192 tokens on the training part of the corpus.

python examples/demo_model/tokenizer.py --out examples/demo_model
"""

from __future__ import annotations

import argparse
from pathlib import Path

from data import DOMAINS, read_corpus
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ["<|pad|>", "<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\n' + message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
# Single digits (numbers of any length look alike) and at most 8 letters a piece, so that Chinese sentences,
# which have no spaces, do not count as one word.
PIECES = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}{1,16}| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def train_tokenizer(vocab_size: int = 8192) -> PreTrainedTokenizerFast:
    """A fast tokenizer that maps any text to bytes-based tokens and back without loss."""
    from tokenizers import Regex

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (document.text for domain in DOMAINS for document in read_corpus(domain, held_out=False))
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A",
        pair="<|bos|> $A $B",
        special_tokens=[("<|bos|>", SPECIAL_TOKENS.index("<|bos|>"))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        additional_special_tokens=["<|system|>", "<|user|>", "<|assistant|>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
        padding_side="left",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("examples/demo_model"))
    args = parser.parse_args()
    train_tokenizer().save_pretrained(args.out)
    print(f"tokenizer written to {args.out}")


if __name__ == "__main__":
    main()
