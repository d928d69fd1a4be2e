"""Which arguments of a program are secrets, which nobody else may read."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

# Words in the name of an argument that is a secret: --api_key, --hf-token, wandb.apiKey; not --tokenizer, --max_tokens.
SECRETS = {"key", "token", "secret", "password", "passwd", "credential", "credentials"}
WORD_OF_NAME = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
HIDDEN = "<hidden>"


def without_secrets(words: Sequence[str], shown: Callable[[str], str] = lambda secret: HIDDEN) -> list[str]:
    """Return what was typed with its secrets replaced: the values of ``--api_key value`` and ``api_key=value``."""
    kept: list[str] = []
    is_value = False
    for word in words:
        parts = word.split("=")
        named = next((end for end in range(1, len(parts)) if _is_secret(parts[end - 1])), 0)
        is_option = word.startswith("-") and len(word) > 1
        if is_value and not is_option:
            kept.append(shown(word))
        elif named:
            kept.append("=".join([*parts[:named], shown("=".join(parts[named:]))]))
        else:
            kept.append(word)
        is_value = is_option and len(parts) == 1 and _is_secret(word)
    return kept


def _is_secret(name: str) -> bool:
    return any(word.lower() in SECRETS for word in WORD_OF_NAME.findall(name))
