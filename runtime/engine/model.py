"""Runs the decode and prefill sessions over the KV cache, with everything bound beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from ortolan.errors import EngineError
from ortolan.graphs import contract as c
from ortolan.graphs.manifest import ModelConfig
from ortolan.runtime.engine.kv_cache import KvCache
from ortolan.runtime.engine.sessions import SessionSet

FloatArray = npt.NDArray[np.float32]


class _Binding:
    """An IOBinding and the numpy arrays that it reads and writes.

    The arrays are written in place between runs; nothing is bound again.
    """

    def __init__(self, session: ort.InferenceSession) -> None:
        self._session = session
        self._binding = session.io_binding()
        self._kept: list[Any] = []  # bound memory must outlive the binding

    def input(self, name: str, array: npt.NDArray[Any]) -> None:
        self._binding.bind_ortvalue_input(name, self._value(array))

    def output(self, name: str, array: npt.NDArray[Any]) -> None:
        self._binding.bind_ortvalue_output(name, self._value(array))

    def kv(self, config: ModelConfig, cache: KvCache, first: int, rows: int) -> None:
        """Past and present of those slots: one buffer, written in place."""
        for layer in range(config.num_layers):
            for part, name in enumerate(c.PARTS):
                value = cache.value(layer, part, first, rows)
                self._kept.append(value)
                self._binding.bind_ortvalue_input(c.past_name(layer, name), value)
                self._binding.bind_ortvalue_output(c.present_name(layer, name), value)

    def run(self) -> None:
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as exc:
            raise EngineError(f"a step failed in onnxruntime: {exc}") from exc

    def _value(self, array: npt.NDArray[Any]) -> ort.OrtValue:
        value = ort.OrtValue.ortvalue_from_numpy(array)
        self._kept.append((array, value))
        return value


class _DecodeBinding(_Binding):
    """One token for each of `rows` slots from `first` on."""

    def __init__(self, model: Model, first: int, rows: int) -> None:
        super().__init__(model.sessions.decode)
        self.ids = np.zeros((rows, 1), np.int64)
        self.seqlens_k = np.zeros(rows, np.int32)
        self.total = np.zeros((), np.int32)
        self.logits = model.decode_logits[:rows]
        self.input(c.INPUT_IDS, self.ids)
        self.input(c.SEQLENS_K, self.seqlens_k)
        self.input(c.TOTAL_SEQUENCE_LENGTH, self.total)
        self.kv(model.config, model.cache, first, rows)
        self.output(c.LOGITS, self.logits)


class _PrefillBinding(_Binding):
    """A chunk for each of `rows` slots from `first` on; ids and logits are bound per shape."""

    def __init__(self, model: Model, first: int, rows: int) -> None:
        super().__init__(model.sessions.prefill)
        self._model = model
        self._rows = rows
        self.seqlens_k = np.zeros(rows, np.int32)
        self.total = np.zeros((), np.int32)
        self.query_seqlens = np.zeros(rows, np.int32)
        self.input(c.SEQLENS_K, self.seqlens_k)
        self.input(c.TOTAL_SEQUENCE_LENGTH, self.total)
        if model.sessions.ragged:
            self.input(c.QUERY_SEQLENS, self.query_seqlens)
        self.kv(model.config, model.cache, first, rows)
        self._fixed = len(self._kept)
        self._shape = (0, 0)

    def shape(self, chunk: int, logits: int) -> None:
        """Bind ids [rows, chunk] and `logits` logits per row, unless they are bound already."""
        if (chunk, logits) == self._shape:
            return
        self._shape = (0, 0)
        del self._kept[self._fixed :]
        self.ids = np.zeros((self._rows, chunk), np.int64)
        self.logits_index = np.zeros((self._rows, logits), np.int32)
        self.logits = self._model.prefill_logits(self._rows, logits)
        self.input(c.INPUT_IDS, self.ids)
        self.input(c.LOGITS_INDEX, self.logits_index)
        self.output(c.LOGITS, self.logits)
        self._shape = (chunk, logits)


class Model:
    """The decoder as two calls, `prefill` and `decode`, over slots of the KV cache.

    row_multiple: what decode's rows are made up to, by idle slots after them, which the caller
    leaves free; pairs: whether prefill's tokens and logits are made even. Both are about products
    in which a single row left over has other bits (rule 1d; see runtime/row_pairs.py).
    Returned logits are views that the next call overwrites.
    """

    def __init__(
        self,
        config: ModelConfig,
        sessions: SessionSet,
        cache: KvCache,
        row_multiple: int,
        *,
        pairs: bool,
    ) -> None:
        self.config = config
        self.sessions = sessions
        self.cache = cache
        self.row_multiple = row_multiple
        self.pairs = pairs
        # Every batch size writes its logits here: the next call overwrites them anyway.
        self.decode_logits: FloatArray = np.zeros((cache.slots, 1, config.vocab_size), np.float32)
        self._prefill_logits: FloatArray = np.zeros(0, np.float32)
        self._decode: dict[tuple[int, int], _DecodeBinding] = {}
        self._prefill: dict[tuple[int, int], _PrefillBinding] = {}

    @property
    def ragged(self) -> bool:
        """Whether a prefill call takes several rows, of different sizes."""
        return self.sessions.ragged

    def decode(self, first: int, token_ids: Sequence[int], lengths: Sequence[int]) -> FloatArray:
        """Logits [rows, vocab] after one token for each slot from `first` on.

        lengths: tokens that each slot holds before this one.
        """
        rows = len(token_ids)
        if rows % self.row_multiple:
            return self._decode_beside_idle(first, token_ids, lengths)
        binding = self._decode.get((first, rows))
        if binding is None:
            binding = self._decode[first, rows] = _DecodeBinding(self, first, rows)
        binding.ids[:, 0] = token_ids
        binding.seqlens_k[:] = lengths
        binding.total[...] = max(lengths) + 1
        binding.run()
        return binding.logits[:, 0]

    def _decode_beside_idle(
        self, first: int, token_ids: Sequence[int], lengths: Sequence[int]
    ) -> FloatArray:
        """Rows together with idle ones after them.

        These write the first position of their slots, which a prompt writes before it is read.
        """
        rows = len(token_ids)
        idle = [0] * (-rows % self.row_multiple)
        return self.decode(first, [*token_ids, *idle], [*lengths, *idle])[:rows]

    def prefill_logits(self, rows: int, wanted: int) -> FloatArray:
        """Where a prefill call writes logits [rows, wanted, vocab]; the next one overwrites them.

        One piece of memory for all shapes and slots: with large vocabularies, one for each would
        come to hundreds of megabytes.
        """
        size = rows * wanted * self.config.vocab_size
        if size > self._prefill_logits.size:
            self._prefill_logits = np.zeros(max(size, 2 * self._prefill_logits.size), np.float32)
        return self._prefill_logits[:size].reshape(rows, wanted, self.config.vocab_size)

    def prefill(
        self,
        first: int,
        token_ids: Sequence[Sequence[int]],
        lengths: Sequence[int],
        logits_index: Sequence[Sequence[int]],
    ) -> FloatArray:
        """Read a chunk of tokens into each slot from `first` on; logits [rows, n, vocab].

        lengths: tokens that each slot holds before. logits_index: positions in the chunk, n per
        row. Rows of different sizes need a provider with ragged prefill.
        """
        rows = len(token_ids)
        sizes = [len(ids) for ids in token_ids]
        chunk = max(sizes)
        if self.pairs and self.sessions.ragged and rows % 2:
            chunk += chunk % 2
        if not self.sessions.ragged and (rows > 1 or min(sizes) < chunk):
            raise EngineError("this provider prefills one row at a time")
        binding = self._prefill.get((first, rows))
        if binding is None:
            binding = self._prefill[first, rows] = _PrefillBinding(self, first, rows)
        wanted = len(logits_index[0])
        if self.pairs and rows * wanted % 2:  # the same for the head's product
            logits_index = [[*index, index[-1]] for index in logits_index]
        binding.shape(chunk, len(logits_index[0]))
        for row, ids in enumerate(token_ids):
            binding.ids[row, : len(ids)] = ids
            binding.ids[row, len(ids) :] = 0
        binding.query_seqlens[:] = sizes
        totals = [n + size for n, size in zip(lengths, sizes, strict=True)]
        binding.seqlens_k[:] = [total - 1 for total in totals]
        binding.total[...] = max(*totals, chunk)  # the kernel wants room for the padding as well
        binding.logits_index[:] = logits_index
        binding.run()
        return binding.logits[:, :wanted]
