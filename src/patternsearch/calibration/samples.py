# SPDX-License-Identifier: Apache-2.0
"""Draws the samples of a recipe: exact lengths, reproducible, held-out ones apart.

Sample k of length L and split S of a source depends on the seed, the source and (L, S, k) alone,
never on the other sources, on what was drawn before, or on the machine. So a resumed run, another
rank or a later validation draws the same tokens again.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from patternsearch.calibration.packing import Document, DryError, Packer
from patternsearch.calibration.plan import ResolvedRecipe, Slot, plan_slots, resolve
from patternsearch.calibration.randomness import key_digest
from patternsearch.calibration.recipes import PackageSource, Recipe, SyntheticSource
from patternsearch.calibration.sources import DocumentSource, is_heldout, iter_documents
from patternsearch.calibration.synthetic import TaskPrompt, build_task, spread_depth
from patternsearch.calibration.tokens import Encoder, Tokenizer
from patternsearch.errors import RecipeError
from patternsearch.progress import Progress, Silent

__all__ = ["DocumentSpan", "Sample", "draw_samples", "draw_slots"]

_TASK = "samples"


class DocumentSpan(NamedTuple):
    """A document's place in a sample; it reaches to the next span or the sample's end.

    Attributes:
        source: name of the source.
        document: id of the document within the source.
        offset: first token, counted in the sample.
        start: that token's position within the document; more than 0 where an earlier sample
            used the beginning.
    """

    source: str
    document: str
    offset: int
    start: int


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One prompt to calibrate or validate on.

    Attributes:
        sample_id: such as ``l4096-003-needle``.
        source: name of the source.
        split: calibration or heldout.
        length: the length asked for, in tokens.
        num_tokens: real tokens; always equal to ``length``.
        sha256: digest of the token ids as little-endian int32.
        token_ids: int32, shape [num_tokens], read-only.
        documents: where each document begins; special tokens in front belong to none.
        task: question, answer and depth of a synthetic task; None for documents.
    """

    sample_id: str
    source: str
    split: Literal["calibration", "heldout"]
    length: int
    num_tokens: int
    sha256: str
    token_ids: NDArray[np.int32]
    documents: tuple[DocumentSpan, ...]
    task: TaskPrompt | None


def draw_samples(
    recipe: Recipe,
    tokenizer: Tokenizer,
    *,
    lengths: Sequence[int] | None = None,
    samples: int | None = None,
    seed: int | None = None,
    base_dir: Path,
    progress: Progress | None = None,
) -> list[Sample]:
    """Resolve a recipe and draw all its samples.

    Args:
        recipe: the recipe.
        tokenizer: the model's transformers tokenizer.
        lengths: tokens; None takes the recipe's.
        samples: calibration samples for every length; None takes the recipe's.
        seed: None takes the recipe's.
        base_dir: the folder that relative paths in the recipe start from: the recipe's own.
        progress: told about every sample drawn, in tokens.

    Returns:
        The samples, lengths ascending, calibration before held-out.

    Raises:
        RecipeError: a source runs dry (the message says which, and how much it had), or cannot be
            read.
        EnvironmentLacks: a package is missing or the hub cannot be reached.
    """
    resolved = resolve(recipe, lengths=lengths, samples=samples, seed=seed)
    return draw_slots(
        resolved, plan_slots(resolved), tokenizer, base_dir=base_dir, progress=progress
    )


def draw_slots(
    resolved: ResolvedRecipe,
    slots: Sequence[Slot],
    tokenizer: Tokenizer,
    *,
    base_dir: Path,
    progress: Progress | None = None,
) -> list[Sample]:
    """Draw some or all samples of a plan (such as the share of one rank), in the given order."""
    progress = progress or Silent()
    encoder = Encoder(tokenizer, chat_template=resolved.chat_template)
    progress.start(_TASK, float(sum(slot.length for slot in slots)), "tokens")
    drawers: dict[str, _DocumentDrawer] = {}
    result = []
    for slot in slots:
        if isinstance(slot.source, SyntheticSource):
            sample = _draw_task(resolved.seed, slot, slot.source, encoder)
        else:
            name = slot.source.name
            if name not in drawers:
                drawers[name] = _DocumentDrawer(resolved, slot.source, slots, encoder, base_dir)
            sample = drawers[name].draw(slot)
        result.append(sample)
        progress.advance(_TASK, float(slot.length), sample.sample_id)
    progress.finish(_TASK)
    return result


def _sample(
    slot: Slot,
    token_ids: NDArray[np.int32],
    documents: tuple[DocumentSpan, ...],
    task: TaskPrompt | None,
) -> Sample:
    assert token_ids.dtype == np.int32
    assert token_ids.size == slot.length
    token_ids.setflags(write=False)
    return Sample(
        sample_id=slot.sample_id,
        source=slot.source.name,
        split=slot.split,
        length=slot.length,
        num_tokens=int(token_ids.size),
        sha256=hashlib.sha256(token_ids.astype("<i4").tobytes()).hexdigest(),
        token_ids=token_ids,
        documents=documents,
        task=task,
    )


def _draw_task(seed: int, slot: Slot, source: SyntheticSource, encoder: Encoder) -> Sample:
    series = (seed, source.name, source.task, slot.split, slot.length)
    if source.depths is None:
        depth = spread_depth(slot.index, *series)
    else:
        depth = source.depths[slot.index % len(source.depths)]
    try:
        task = build_task(
            source.task, encoder, length=slot.length, depth=depth, key=(*series, slot.index)
        )
    except RecipeError as error:
        raise RecipeError(f"source {source.name}: {error}") from None
    document = f"{source.task}/{slot.split}/{slot.length}/{slot.index}"
    span = DocumentSpan(source.name, document, offset=int(encoder.prefix.size), start=0)
    return _sample(slot, task.token_ids, (span,), task)


class _DocumentDrawer:
    """Draws the samples of one source of documents, which it reads once."""

    def __init__(
        self,
        resolved: ResolvedRecipe,
        source: DocumentSource,
        slots: Sequence[Slot],
        encoder: Encoder,
        base_dir: Path,
    ) -> None:
        self._seed = resolved.seed
        self._fraction = resolved.heldout_fraction if source.heldout else 0.0
        self._source = source
        self._slots = slots
        self._encoder = encoder
        self._stream = iter_documents(
            source, seed=resolved.seed, base_dir=base_dir, encoder=encoder
        )
        self._read: list[Document] = []
        self._packers: dict[tuple[str, int], tuple[Packer, int]] = {}
        self._frame: tuple[NDArray[np.int32], NDArray[np.int32]] | None = None

    def draw(self, slot: Slot) -> Sample:
        """Draw the sample of a slot; slots of one length and split must ascend."""
        stream = (slot.split, slot.length)
        if stream not in self._packers:
            mine = self._source.name, *stream
            last = max(s.index for s in self._slots if (s.source.name, s.split, s.length) == mine)
            packer = Packer(
                self._documents(*stream),
                self._encoder.encode_all,
                expected=(last + 1) * slot.length,
            )
            self._packers[stream] = packer, 0
        packer, done = self._packers[stream]
        assert slot.index >= done
        for index in range(done, slot.index):
            # Another rank's sample: its tokens are passed over.
            self._take(packer, slot, index)
        sample = self._take(packer, slot, slot.index)
        self._packers[stream] = packer, slot.index + 1
        return sample

    def _take(self, packer: Packer, slot: Slot, index: int) -> Sample:
        before, after = self._special_tokens()
        room = slot.length - before.size - after.size
        if room < 1:
            raise RecipeError(
                f"source {self._source.name}: length {slot.length} leaves no room beside the "
                f"{before.size + after.size} tokens of the chat template: drop that length"
            )
        try:
            pieces = packer.take(room)
        except DryError as dry:
            raise self._dry(dry, slot, index, room) from None
        spans = []
        offset = int(before.size)
        for piece in pieces:
            spans.append(
                DocumentSpan(self._source.name, piece.document, offset=offset, start=piece.start)
            )
            offset += int(piece.token_ids.size)
        token_ids = np.concatenate([before, *(piece.token_ids for piece in pieces), after])
        return _sample(slot, token_ids, tuple(spans), None)

    def _dry(self, dry: DryError, slot: Slot, index: int, room: int) -> RecipeError:
        share = ""
        if self._fraction:
            kind = "held-out" if slot.split == "heldout" else "calibration"
            share = f" in the {kind} share of its documents"
        return RecipeError(
            f"source {self._source.name} ran dry: {slot.split} sample {index + 1} of length "
            f"{slot.length} needs {room} tokens and lacks {dry.missing} of them; the source had "
            f"{dry.num_tokens} tokens in {dry.num_documents} documents{share}: give it more text, "
            "or take fewer samples or shorter lengths"
        )

    def _special_tokens(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        if self._frame is None:
            first = next(self._replay(), None)
            nothing = np.empty(0, dtype=np.int32)
            if first is not None and first.is_conversation:
                self._frame = self._encoder.prefix, nothing
            else:
                self._frame = self._encoder.frame()
        return self._frame

    def _documents(self, split: str, length: int) -> Iterator[Document]:
        """Yield a split's documents; a package's come in another order for every length."""
        if isinstance(self._source, PackageSource):
            yield from sorted(
                self._of_split(split),
                key=lambda document: key_digest(self._seed, self._source.name, length, document.id),
            )
        else:
            yield from self._of_split(split)

    def _of_split(self, split: str) -> Iterator[Document]:
        for position, document in enumerate(self._replay()):
            if is_heldout(position, self._fraction) == (split == "heldout"):
                yield document

    def _replay(self) -> Iterator[Document]:
        position = 0
        while True:
            if position == len(self._read):
                document = next(self._stream, None)
                if document is None:
                    return
                if self._read and document.is_conversation != self._read[0].is_conversation:
                    raise RecipeError(
                        f"source {self._source.name}: {document.id} mixes texts and lists of "
                        "messages in one field: make it two sources"
                    )
                self._read.append(document)
            yield self._read[position]
            position += 1
