"""What an execution provider tells the engine about itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, Literal

from ortolan.errors import ProviderError
from ortolan.runtime.providers.options import Option, checked_options

Dtype = Literal["float32", "float16", "bfloat16"]
Flavor = Literal["gqa", "onnx"]

# ONNX Runtime's run option that says which captured graph a run belongs to; -1: none.
_GRAPH_ID, _NO_GRAPH = "gpu_graph_id", "-1"


@dataclass(frozen=True)
class Capabilities:
    """What a provider's kernels and memory can do; the engine adapts to it.

    ragged_prefill: GroupQueryAttention takes query_seqlens, so several prompts share a call;
    without it prompts are read one at a time.
    packs_weights: an optimized, prepacked form can be saved and memory-mapped.
    in_place_kv: past and present may be one buffer; without it every step copies the cache.
    slices: a part of an array in its memory can be bound, as on the host. Without it decode runs
    over all slots, and a graph moves them.
    ragged_decode: rows of different lengths decode in one call; without it one call each.
    most_prefill_tokens: most tokens of one prefill call that come out right; None: any number.
    int8_kv: attention reads a quantized cache. flavors, dtypes: of the bundles that it runs.
    graphs_captured: it can record a decode call's kernels and launch them as one; see `captures`.
    """

    ragged_prefill: bool = False
    packs_weights: bool = False
    in_place_kv: bool = True
    slices: bool = False
    ragged_decode: bool = True
    most_prefill_tokens: int | None = None
    int8_kv: bool = False
    flavors: tuple[Flavor, ...] = ("gqa", "onnx")
    dtypes: tuple[Dtype, ...] = ("float32",)
    graphs_captured: bool = False


@dataclass(frozen=True)
class Provider:
    """An execution provider. `ort_name` is ONNX Runtime's name for it.

    device: the name by which outputs are bound to its memory, "cpu" where it works on host memory.
    device_id: which of its devices.
    distribution: the package on PyPI that has it; remedy: what to do where it cannot run; extra:
    of ours, which installs it. systems: where there is such a package, as sys.platform names
    them; empty: everywhere. hint: what to look at where it is installed and does not run.
    session_config: config entries of every session; options: the provider's own.
    known_options: those that a user may set. option_prefix: where ONNX Runtime reads the options
    from the session's config, what their names begin with there.
    capture_option: the option that switches capture on. threads_option: that of a thread pool of
    its own, which follows --threads unless a user sets it.
    memory_pattern: whether its sessions may plan memory ahead. sequential: whether it demands
    that nodes run one after another.
    list_devices: its devices for people, where ONNX Runtime does not list them.
    prepare: what has to be called with the module `onnxruntime` before the first session.
    strict: a session in which it leaves compute to the CPU is refused; see placement.py.
    """

    name: str
    ort_name: str
    capabilities: Capabilities
    distribution: str
    remedy: str
    device: str = "cpu"
    device_id: int = 0
    session_config: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    memory_pattern: bool = True
    sequential: bool = False
    extra: str = ""
    systems: tuple[str, ...] = ()
    hint: str = ""
    known_options: Mapping[str, Option] = field(default_factory=dict)
    option_prefix: str = ""
    capture_option: str = ""
    threads_option: str = ""
    list_devices: Callable[[], Sequence[str]] | None = None
    prepare: Callable[[ModuleType], None] | None = None
    strict: bool = False

    @property
    def on_host(self) -> bool:
        """Whether what it binds is host memory, which numpy reads and writes."""
        return self.device == "cpu"

    @property
    def captures(self) -> bool:
        """Whether decode calls are recorded once and launched as one from then on.

        A recorded call reads and writes the addresses that were bound when it was recorded, in
        the shapes of then; what changes between calls has to lie in its memory. Numbers that a
        kernel reads on the host keep their values of then: total_sequence_length has to be the
        capacity, so that one recording serves every length.
        """
        return self.capabilities.graphs_captured and self.options.get(self.capture_option) == "1"

    def run_config(self, rows: int | None) -> Mapping[str, str]:
        """Entries for RunOptions.add_run_config_entry of a call.

        rows: of a decode call, whose buffers and shapes are always the same for that many rows:
        each number of rows is recorded for itself. None: any other call of a session that
        captures; it is not recorded.
        """
        if not self.captures:
            return {}
        return {_GRAPH_ID: _NO_GRAPH if rows is None else str(rows)}

    def with_options(self, options: Mapping[str, Any]) -> Provider:
        """The same with a user's options laid over its own.

        Raises UsageError for a name or value that it does not take.
        """
        given = checked_options(self.name, self.known_options, options)
        device_id = int(given.get("device_id", self.device_id))
        return replace(self, options={**self.options, **given}, device_id=device_id)

    def with_threads(self, threads: int) -> Provider:
        """The same computing with so many threads, where they are its own."""
        if not self.threads_option or self.threads_option in self.options:
            return self
        return replace(self, options={**self.options, self.threads_option: str(threads)})

    def open_session(
        self, ort: ModuleType, model: bytes | str, options: Any, *, captured: bool = False
    ) -> Any:
        """An InferenceSession of this module `ort` on the provider, without any other.

        options: SessionOptions. captured: whether its calls may be recorded, if the provider
        does that: decode's, whose shapes repeat.
        What goes wrong is raised as ONNX Runtime raises it. Raises ProviderError if ONNX Runtime
        went on without the provider, as it does with no more than a line in its log.
        """
        if self.prepare is not None:
            self.prepare(ort)
        if not self.memory_pattern or (captured and self.captures):
            options.enable_mem_pattern = False
        if self.sequential:
            options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
        own = {
            name: str(value)
            for name, value in self.options.items()
            if captured or name != self.capture_option
        }
        if self.option_prefix:
            for name, value in own.items():
                options.add_session_config_entry(self.option_prefix + name, value)
            own = {}
        session = self._session(ort, model, options, own)
        if self.ort_name not in session.get_providers():
            raise ProviderError(
                f"onnxruntime {ort.__version__} could not set up {self.ort_name} here, as its log "
                f"says; {self.hint or self.remedy}"
            )
        return session

    def _session(self, ort: ModuleType, model: bytes | str, options: Any, own: Any) -> Any:
        return ort.InferenceSession(
            model,
            options,
            providers=[(self.ort_name, own)],
            enable_fallback=0,  # or a provider that fails to start is replaced by the CPU
        )
