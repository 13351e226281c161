"""Define what the API needs of a model that makes vectors or scores of whole texts.

`Appliance.text_encoders` has them by served name; it is empty where none is served.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, Protocol


class TextEncoder(Protocol):
    """Compute one vector, or one score, for each text on the prefill workers."""

    @property
    def name(self) -> str:
        """The name that clients ask for."""

    @property
    def kind(self) -> Literal["embedding", "rerank"]:
        """Whether it makes vectors or scores."""

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest text, or pair of texts."""

    @property
    def num_dimensions(self) -> int | None:
        """Numbers in a vector; None: it makes scores."""

    @property
    def prompts(self) -> Mapping[str, str]:
        """Texts to put before a text, by the names that sentence-transformers knows them by."""

    @property
    def default_prompt(self) -> str | None:
        """The name of the prompt of texts for which none is named; None: they have none."""

    def tokenize(self, texts: Iterable[str]) -> Iterator[list[int]]:
        """Encode texts, with the model's special tokens."""

    def tokenize_pairs(self, pairs: Iterable[tuple[str, str]]) -> Iterator[list[int]]:
        """Encode queries, each with a document, for scores, with the model's special tokens."""

    def num_unpooled(self, prompt: str) -> int:
        """Count the first tokens of texts behind this prompt that their pooling leaves out."""

    def check(self, texts: Sequence[Sequence[int]]) -> None:
        """Check token ids; it takes long for many, so call it in a thread.

        Raises:
            RequestError: a text is empty or too long, or has a token that the model does not know.
        """

    async def compute(
        self, owner: str, texts: Sequence[list[int]], num_unpooled: Sequence[int] = ()
    ) -> list[array[float]]:
        """Compute a float32 vector for each text, or one number: its score before the sigmoid.

        Vectors are normalised where the model's files say so. Cancelling it drops what waits.

        Args:
            owner: the queue is shared fairly between owners.
            texts: token ids that check() has passed; not changed afterwards.
            num_unpooled: the first tokens of each that its pooling leaves out; empty: of none.

        Raises:
            RequestError: a result is no number.
            Unavailable: no worker computes it.
        """
