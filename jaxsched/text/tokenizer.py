"""One tokenizer, whichever files it came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from .chat import ChatTemplateError, render_chat

DEFAULT_TEMPLATE, TOOL_TEMPLATE = "default", "tool_use"


class TokenizerError(ValueError):
    """Tokenizer files or text that cannot be used."""


class Tokenizer:
    """Text <-> token ids, and chat messages -> text. Immutable after construction and safe to share or pickle.

    ``special_tokens`` maps Hugging Face's names ("bos_token", "eos_token", ...) to the tokens; chat templates see them
    as variables. ``chat_templates`` maps names to Jinja sources. ``eos_token_ids`` defaults to the id of eos_token.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
        eos_token_ids: Sequence[int] | None = None,
    ):
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.chat_templates = dict(chat_templates or {})
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.bos_token_id = self._named_id("bos_token")
        eos = self._named_id("eos_token")
        self.eos_token_ids = tuple(
            eos_token_ids if eos_token_ids is not None else () if eos is None else (eos,)
        )
        added = backend.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        self.special_ids = frozenset(token for token, value in added.items() if value.special)
        self.byte_values = self._find_byte_values()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of ``text``; with ``add_special_tokens`` those that the checkpoint puts around it (usually a BOS).

        Names of special tokens inside the text become those tokens.
        Raises TokenizerError for text that is not a string of Unicode characters.
        """
        if not isinstance(text, str):
            raise TokenizerError(f"text to encode is a {type(text).__name__}; give a str")
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeEncodeError) as error:
            raise TokenizerError(
                "text to encode has half of a surrogate pair, which is no character; decode it as UTF-8 first"
            ) from error

    def decode(
        self,
        ids: Sequence[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """Text of ``ids``. Bytes that are not UTF-8 become U+FFFD; ids outside the vocabulary have no text.

        Some vocabularies put a space before every token. ``spaces_between_special_tokens=False``: none between two
        added tokens; it says nothing where special tokens are skipped, as in vLLM.
        """
        given = ids if isinstance(ids, list) else list(ids)
        if skip_special_tokens or spaces_between_special_tokens:
            return self._backend.decode(given, skip_special_tokens)
        return "".join(self._backend.decode(part, False) for part in self._parts(given))

    def _parts(self, ids: list[int]) -> list[list[int]]:
        """``ids`` of the vocabulary, cut between any two added tokens."""
        parts: list[list[int]] = []
        for token in ids:
            if self._backend.id_to_token(token) is None:
                continue
            if not parts or (token in self._added_ids and parts[-1][-1] in self._added_ids):
                parts.append([])
            parts[-1].append(token)
        return parts

    def id_of(self, token: str) -> int | None:
        """Id of one token by its exact spelling in the vocabulary."""
        return self._backend.token_to_id(token)

    def token_of(self, token_id: int) -> str | None:
        """Spelling in the vocabulary of one id, e.g. "Ġthe"; None outside the vocabulary."""
        return self._backend.id_to_token(token_id)

    @property
    def chat_template(self) -> str | None:
        """The Jinja source that ``apply_chat_template`` uses without tools."""
        return self.chat_templates.get(DEFAULT_TEMPLATE)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **variables: Any,
    ) -> str:
        """Text of a conversation, ending where the model is to write; see ``render_chat``.

        ``chat_template`` (Jinja source) replaces the checkpoint's own. The template sees the named special tokens,
        ``chat_template_kwargs`` and ``variables``; of one name the later one. Encode the result with
        ``add_special_tokens=False``: templates write the BOS themselves. Raises ChatTemplateError, also when there is
        no template.
        """
        template = chat_template
        if template is None and tools:
            template = self.chat_templates.get(TOOL_TEMPLATE)
        template = template if template is not None else self.chat_template
        if template is None:
            named = (
                f" by the name of 'default' (it has {sorted(self.chat_templates)})"
                if self.chat_templates
                else ""
            )
            raise ChatTemplateError(
                f"this checkpoint has no chat template{named}; pass chat_template=, or give the prompt as text"
            )
        return render_chat(
            template,
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            variables={**self.special_tokens, **_variables(chat_template_kwargs), **variables},
        )

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Ids of a conversation; ``options`` are those of ``apply_chat_template``. The only BOS is the template's."""
        return self.encode(self.apply_chat_template(messages, **options), add_special_tokens=False)

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        found = None if token is None else self._backend.token_to_id(token)
        if token is not None and found is None:
            raise TokenizerError(
                f"{name} {token!r} is not in the vocabulary; the tokenizer files do not fit together"
            )
        return found

    def _find_byte_values(self) -> dict[int, int]:
        """Id -> byte of the tokens that are one byte each, for decoders that join them (sentencepiece)."""
        if "ByteFallback" not in str(self._backend.decoder):
            return {}
        found = ((self._backend.token_to_id(f"<0x{byte:02X}>"), byte) for byte in range(256))
        return {token: byte for token, byte in found if token is not None}


def _variables(given: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if given is not None and not (
        isinstance(given, Mapping) and all(isinstance(name, str) for name in given)
    ):
        raise ChatTemplateError(
            f"chat_template_kwargs is {given!r:.60}; give a dict from names of template variables to their values"
        )
    return given or {}
