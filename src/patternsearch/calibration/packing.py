# SPDX-License-Identifier: Apache-2.0
"""Documents to exact numbers of tokens, with nothing added and nothing lost."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Document", "DryError", "Packer", "Piece", "cut_text"]

TokenIds = NDArray[np.int32]

EncodeAll = Callable[[Sequence[str]], Sequence[TokenIds]]
"""Texts to the token ids of each, without special tokens around them."""

_CHUNK_CHARS = 1 << 16
_BATCH_CHARS = 1 << 20
"""Tokenised in one call at most: as many chunks as there are cores, and some 100 MB meanwhile."""


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
    over of theirs. No token is given out twice. Documents are tokenised only as far as needed,
    many at a time where much is to come, which a tokenizer spreads over the cores.

    Args:
        documents: in the order of use; read lazily.
        encode_all: the tokenizer.
        expected: tokens that all requests together will ask for; 0 if that is not known. No
            result depends on it.
    """

    def __init__(
        self, documents: Iterator[Document], encode_all: EncodeAll, *, expected: int = 0
    ) -> None:
        self._documents = documents
        self._encode_all = encode_all
        self._expected = expected
        self._ready: deque[_OpenDocument] = deque()
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
        if not self._ready:
            self._open_more()
        if self._ready:
            self._num_documents += 1
            return self._ready.popleft()
        return self._leftovers.popleft() if self._leftovers else None

    def _open_more(self) -> None:
        """Open as many documents as what is to come may need, at least one; tokenise them."""
        # A token is seldom less than a character: where it is more, the rest is opened later.
        room = min(max(self._expected - self._num_tokens, 1), _BATCH_CHARS)
        texts: list[str] = []
        owners: list[_OpenDocument] = []
        while room > 0 and (document := next(self._documents, None)) is not None:
            opened = _OpenDocument(document, self._encode_all)
            self._ready.append(opened)
            while room > 0 and (chunk := next(opened.chunks, None)) is not None:
                texts.append(chunk)
                owners.append(opened)
                room -= len(chunk)
        for owner, token_ids in zip(owners, self._encode_all(texts), strict=True):
            owner.encoded.append(token_ids)


class _OpenDocument:
    """A document that is being read.

    Attributes:
        id: of the document.
        position: tokens read.
        chunks: of its text, those not tokenised yet.
        encoded: chunks tokenised and not read yet.
    """

    def __init__(self, document: Document, encode_all: EncodeAll) -> None:
        self.id = document.id
        self.position = 0
        self.chunks = cut_text(document.text, _CHUNK_CHARS)
        self.encoded: deque[TokenIds] = deque()
        self._encode_all = encode_all
        self._rest = np.empty(0, dtype=np.int32)

    def read(self, at_most: int) -> TokenIds:
        parts = [self._rest]
        available = self._rest.size
        while available < at_most:
            if not self.encoded:
                chunk = next(self.chunks, None)
                if chunk is None:
                    break
                self.encoded.extend(self._encode_all([chunk]))
            parts.append(self.encoded.popleft())
            available += parts[-1].size
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
