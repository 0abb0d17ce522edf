# SPDX-License-Identifier: Apache-2.0
"""Documents to exact numbers of tokens, with nothing added and nothing lost."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Document", "DryError", "Packer", "Piece", "cut_text"]

TokenIds = NDArray[np.int32]

_CHUNK_CHARS = 1 << 16


@dataclass(frozen=True, slots=True)
class Document:
    """A text of a source.

    Attributes:
        id: names it within its source, such as a path or ``row-12``.
        text: what is tokenised.
        is_conversation: ``text`` is already a rendered chat.
    """

    id: str
    text: str
    is_conversation: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A run of tokens of one document.

    Attributes:
        document: the document's id.
        start: position of the first token within the document.
        token_ids: int32, shape [tokens], at least one.
    """

    document: str
    start: int
    token_ids: TokenIds


class DryError(Exception):
    """No document is left; how much there was.

    Attributes:
        missing: tokens that the request still lacked.
        num_documents: documents read so far.
        num_tokens: tokens of all of them.
    """

    def __init__(self, missing: int, num_documents: int, num_tokens: int) -> None:
        super().__init__(f"{missing} tokens missing")
        self.missing = missing
        self.num_documents = num_documents
        self.num_tokens = num_tokens


class Packer:
    """Takes runs of tokens from a stream of documents.

    Each request begins with documents that no request has seen, so that samples differ as much
    as the source allows; when there are none left, it goes on with what earlier requests left
    over of theirs. No token is given out twice. Documents are tokenised only as far as needed.

    Args:
        documents: in the order of use; read lazily.
        encode: text to token ids, without special tokens around it.
    """

    def __init__(self, documents: Iterator[Document], encode: Callable[[str], TokenIds]) -> None:
        self._documents = documents
        self._encode = encode
        self._leftovers: deque[_OpenDocument] = deque()
        self._num_documents = 0
        self._num_tokens = 0

    def take(self, num_tokens: int) -> list[Piece]:
        """Return pieces that hold exactly ``num_tokens`` tokens together.

        Raises:
            DryError: the documents do not hold that many any more.
        """
        pieces: list[Piece] = []
        missing = num_tokens
        while missing:
            document = self._next()
            if document is None:
                raise DryError(missing, self._num_documents, self._num_tokens)
            start = document.position
            token_ids = document.read(missing)
            if not token_ids.size:
                continue
            missing -= token_ids.size
            self._num_tokens += token_ids.size
            pieces.append(Piece(document.id, start, token_ids))
            if not missing:
                self._leftovers.append(document)
        return pieces

    def _next(self) -> "_OpenDocument | None":
        document = next(self._documents, None)
        if document is not None:
            self._num_documents += 1
            return _OpenDocument(document, self._encode)
        return self._leftovers.popleft() if self._leftovers else None


class _OpenDocument:
    def __init__(self, document: Document, encode: Callable[[str], TokenIds]) -> None:
        self.id = document.id
        self.position = 0
        self._chunks = (encode(chunk) for chunk in cut_text(document.text, _CHUNK_CHARS))
        self._rest = np.empty(0, dtype=np.int32)

    def read(self, at_most: int) -> TokenIds:
        parts = [self._rest]
        available = self._rest.size
        while available < at_most:
            chunk = next(self._chunks, None)
            if chunk is None:
                break
            parts.append(chunk)
            available += chunk.size
        token_ids = np.concatenate(parts)
        self._rest = token_ids[at_most:]
        self.position += min(available, at_most)
        return token_ids[:at_most]


def cut_text(text: str, max_chars: int) -> Iterator[str]:
    """Cut text into parts of at most ``max_chars``, after a line or else a space if there is one.

    The parts joined are the text.
    """
    start = 0
    while len(text) - start > max_chars:
        end = text.rfind("\n", start, start + max_chars) + 1
        if end <= start:
            end = text.rfind(" ", start + 1, start + max_chars)
        if end <= start:
            end = start + max_chars
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]
