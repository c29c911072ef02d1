"""KServe v2's calls: what comes back, what is refused, and how requests and streams end."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_serving import ended, failure, held, in_loop, serving, until
from kserve_requests import infer_request, numbers_of, texts_of
from kserve_serving import Stream, TextMock, asked, mocked, tiny, whole

from ortolan.proto.inference.v2 import grpc_predict_v2_pb2 as pb
from ortolan.proto.inference.v2.grpc_predict_v2_pb2_grpc import GRPCInferenceServiceStub
from ortolan.runtime.bundle import Bundle
from ortolan.runtime.llm import LLM
from ortolan.runtime.params import EngineConfig, SamplingParams

CODE = grpc.StatusCode
LONG = {"max_tokens": 60, "temperature": 0, "ignore_eos": True, "exclude_input_in_output": True}


@in_loop
async def test_server_and_model_say_what_they_are(tiny_bundle: Path) -> None:
    async with tiny(tiny_bundle) as stub:
        assert (await stub.ServerLive(pb.ServerLiveRequest())).live
        assert (await stub.ServerReady(pb.ServerReadyRequest())).ready
        assert (await stub.ModelReady(pb.ModelReadyRequest(name="tiny", version="1"))).ready
        assert (await stub.ServerMetadata(pb.ServerMetadataRequest())).name == "ortolan"
        metadata = await stub.ModelMetadata(pb.ModelMetadataRequest(name="tiny"))
        assert (metadata.name, list(metadata.versions)) == ("tiny", ["1"])
        inputs = {t.name: (t.datatype, list(t.shape)) for t in metadata.inputs}
        assert inputs["text_input"] == ("BYTES", [1])
        assert inputs["stream"] == ("BOOL", [1])
        assert inputs["temperature"] == ("FP32", [1])
        assert inputs["max_tokens"] == ("INT32", [1])
        assert inputs["stop"] == ("BYTES", [-1])
        outputs = {t.name: (t.datatype, list(t.shape)) for t in metadata.outputs}
        assert outputs["text_output"] == ("BYTES", [-1])


@in_loop
async def test_readiness_is_the_services() -> None:
    """vllm#39863: it follows the engine, not the socket."""
    async with mocked() as (service, stub):
        service._warm = False
        assert (await stub.ServerLive(pb.ServerLiveRequest())).live
        assert not (await stub.ServerReady(pb.ServerReadyRequest())).ready
        assert not (await stub.ModelReady(pb.ModelReadyRequest(name="mock"))).ready


@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize("n", [1, 3])
@in_loop
async def test_answer_is_the_librarys(tiny_bundle: Path, raw: bool, n: int) -> None:
    """Whole or in a stream, with everything that is told about it."""
    settings = {"max_tokens": 9, "temperature": 0.8, "seed": 3, "n": n}
    request = asked(raw=raw, request_id="7", **settings)
    streamed = asked(raw=raw, request_id="8", stream=True, **settings)
    async with tiny(tiny_bundle) as stub:
        answer = await stub.ModelInfer(request)
        stream = Stream(stub)
        await stream.send(request, streamed)
        responses = await stream.end()
    with LLM(Bundle.open(tiny_bundle), EngineConfig(max_slots=4)) as llm:
        made = llm.generate("the red fox", SamplingParams(**settings))
    expected = made if isinstance(made, list) else [made]
    assert (answer.id, answer.model_name, answer.model_version) == ("7", "tiny", "1")
    assert bool(answer.raw_output_contents) is raw
    assert texts_of(answer) == ["the red fox" + one.text for one in expected]
    assert texts_of(answer, "finish_reason") == [one.finish_reason for one in expected]
    assert numbers_of(answer, "num_input_tokens") == [expected[0].usage.prompt_tokens]
    assert numbers_of(answer, "num_output_tokens") == [
        one.usage.completion_tokens for one in expected
    ]
    assert whole(responses["7"]) == texts_of(answer)
    assert whole(responses["8"]) == [one.text for one in expected]
    counts = [numbers_of(r.infer_response, "num_output_tokens") for r in responses["8"]]
    assert [sum(column) for column in zip(*counts, strict=True)] == [9] * n
    assert len(responses["8"]) > 1
    assert texts_of(responses["8"][0].infer_response, "finish_reason")[-1] == "None"


@in_loop
async def test_cached_tokens_are_told(tiny_bundle: Path) -> None:
    """llama.cpp#26676: a prompt whose KV was there already."""
    text = "the red fox " * 8
    async with tiny(tiny_bundle) as stub:
        cached = [
            numbers_of(await stub.ModelInfer(asked(text=text, max_tokens=1)), "num_cached_tokens")
            for _ in range(2)
        ]
        other = await stub.ModelInfer(asked(text=text, max_tokens=1, cache_salt="other"))
    assert cached[0] == [0]
    assert cached[1] > [0]
    assert numbers_of(other, "num_cached_tokens") == [0]


@pytest.mark.parametrize(
    ("request_", "code", "field", "said"),
    [
        (infer_request(top_p="0"), CODE.INVALID_ARGUMENT, "top_p", "above 0"),
        (infer_request(n=129), CODE.INVALID_ARGUMENT, "n", "128"),
        (infer_request(text=""), CODE.INVALID_ARGUMENT, "text_input", "empty"),
        (infer_request(text="x" * 100), CODE.INVALID_ARGUMENT, "text_input", "100 tokens"),
        (infer_request(stream=True), CODE.INVALID_ARGUMENT, "stream", "ModelStreamInfer"),
        (infer_request(sequence_id=1), CODE.INVALID_ARGUMENT, "parameters", "sequence_id"),
        (infer_request(cache_salt="x" * 1025), CODE.INVALID_ARGUMENT, "cache_salt", "1024"),
        (infer_request(model="other"), CODE.NOT_FOUND, None, "'other'"),
        (infer_request(model=""), CODE.NOT_FOUND, None, "''"),
    ],
)
@in_loop
async def test_what_cannot_be_served_is_refused_by_name(
    request_: pb.ModelInferRequest, code: grpc.StatusCode, field: str | None, said: str
) -> None:
    """On a stream, the same words come in its error message, and the stream goes on."""
    async with mocked() as (_, stub):
        found, message, details = await failure(stub.ModelInfer(request_))
        assert found == code
        assert said in message
        if field is not None:
            assert details["BadRequest"].field_violations[0].field == field
        if field == "stream":
            return
        request_.id = "bad"
        stream = Stream(stub)
        await stream.send(request_, infer_request(request_id="good", **LONG))
        responses = await stream.end()
    (bad,) = responses["bad"]
    assert bad.error_message == message
    assert bad.infer_response.parameters["triton_final_response"].bool_param
    assert numbers_of(responses["good"][-1].infer_response, "num_output_tokens") == [60]


@in_loop
async def test_another_version_is_not_found() -> None:
    async with mocked() as (_, stub):
        request = infer_request()
        request.model_version = "2"
        for call in (
            stub.ModelInfer(request),
            stub.ModelReady(pb.ModelReadyRequest(name="mock", version="2")),
            stub.ModelReady(pb.ModelReadyRequest(name="other")),
            stub.ModelMetadata(pb.ModelMetadataRequest(name="mock", version="2")),
        ):
            assert (await failure(call))[0] == CODE.NOT_FOUND


@in_loop
async def test_requests_of_one_stream_run_together_and_keep_their_ids() -> None:
    """More than there are slots, and two of them with one id, which is a name and not a key."""
    async with mocked(slots=4) as (_, stub):
        alone = await stub.ModelInfer(infer_request(text="abc", **LONG))
        stream = Stream(stub)
        for index in range(10):
            await stream.send(
                infer_request(text="abc", request_id=str(index % 9), stream=True, **LONG)
            )
        responses = await stream.end()
    assert sorted(responses) == [str(index) for index in range(9)]
    counts = {
        name: sum(numbers_of(one.infer_response, "num_output_tokens")[0] for one in ones)
        for name, ones in responses.items()
    }
    (tokens,) = numbers_of(alone, "num_output_tokens")
    assert counts == {"0": 2 * tokens} | {str(index): tokens for index in range(1, 9)}


@in_loop
async def test_next_requests_are_read_while_others_run() -> None:
    """A client may wait for an answer before it asks the next thing, on one stream."""
    async with mocked() as (service, stub):
        stream = Stream(stub)
        await stream.send(infer_request(request_id="1", **LONG))
        assert (await stream.call.read()).infer_response.id == "1"
        service.hold()
        await stream.send(infer_request(request_id="2", **LONG))
        await held(service)
        await stream.send(infer_request(request_id="3", **(LONG | {"max_tokens": 0})))
        await until(lambda: service.told)
        service.gate.open()
        assert sorted(await stream.end()) == ["2", "3"]


@pytest.mark.parametrize("how", ["cancel", "disconnect"])
@pytest.mark.parametrize("streaming", [True, False])
@in_loop
async def test_call_that_its_client_leaves_frees_every_slot_within_a_step(
    how: str, streaming: bool
) -> None:
    """llama.cpp#24496: for every request of a stream, and every one of n answers."""
    service = TextMock(slots=4)
    async with serving(service) as address:
        channel = grpc.aio.insecure_channel(address)
        stub = GRPCInferenceServiceStub(channel)
        service.hold()
        call: Any
        if streaming:
            stream = Stream(stub)
            await stream.send(infer_request(n=2, stream=True, **LONG), infer_request(n=2, **LONG))
            call = stream.call
        else:
            call = stub.ModelInfer(infer_request(n=4, **LONG))
        while service.stats().running < 4:
            await held(service)
            service.gate.step()
            await asyncio.sleep(0.01)
        await held(service)
        await asyncio.sleep(0.05)
        if how == "cancel":
            call.cancel()
        await channel.close()
        # One cancellation for each request, then one step.
        await until(lambda: len(service._engine._inbox) == 1 + streaming)
        passed = service.gate.passed
        service.gate.step()
        await until(lambda: service.stats().running == 0)
        assert service.gate.passed == passed + 1
        assert service.stats().ended["cancelled"] == 4


@in_loop
async def test_deadline_of_a_call_and_timeout_of_a_request() -> None:
    """The one ends the call with a status, the other its request, and the stream goes on."""
    async with mocked() as (service, stub):
        service.hold()
        code = (await failure_code(stub.ModelInfer(infer_request(**LONG), timeout=0.3)))[0]
        assert code == CODE.DEADLINE_EXCEEDED
        stream = Stream(stub, timeout=0.3)
        await stream.send(infer_request(**LONG))
        assert (await failure_code(stream.call))[0] == CODE.DEADLINE_EXCEEDED
        stream = Stream(stub)
        await stream.send(infer_request(request_id="late", timeout=1000, **LONG))
        ending = asyncio.ensure_future(stream.end())
        await asyncio.sleep(0.1)
        service.gate.open()
        (late,) = (await ending)["late"]
        assert "time" in late.error_message
        await until(lambda: not service._engine.busy)


async def failure_code(call: Any) -> tuple[grpc.StatusCode, str]:
    """A failing call's code and text; gRPC's own failures have no details."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ended(call)
    return caught.value.code(), str(caught.value.details())


@in_loop
async def test_error_in_the_middle_ends_its_request_alone() -> None:
    """sglang#33187: logits that are not finite, in one request of a stream."""
    async with mocked() as (_, stub):
        stream = Stream(stub)
        await stream.send(
            infer_request(text="a!", request_id="bad", stream=True, **LONG),
            infer_request(text="abc", request_id="good", stream=True, **LONG),
        )
        responses = await stream.end()
    assert responses["bad"][-1].error_message
    assert not responses["good"][-1].error_message
    whole(responses["good"])


@in_loop
async def test_fault_of_ours_is_told_without_its_words(caplog: pytest.LogCaptureFixture) -> None:
    """Its text may hold a piece of a prompt; the log has its kind and place."""
    async with mocked() as (service, stub):

        async def broken(prompt: Any) -> list[int]:
            raise ZeroDivisionError(prompt)

        service.encode = broken  # type: ignore[method-assign]
        stream = Stream(stub)
        await stream.send(infer_request(text="secret", request_id="1"))
        ((failed,),) = (await stream.end()).values()
        assert "unexpected" in failed.error_message
        assert (await failure(stub.ModelInfer(infer_request(text="secret"))))[0] == CODE.INTERNAL
    assert "ZeroDivisionError" in caplog.text
    assert "secret" not in caplog.text + failed.error_message


@in_loop
async def test_full_queue_refuses_one_request_and_not_the_stream() -> None:
    async with mocked(slots=1, max_waiting=1) as (service, stub):
        service.hold()
        stream = Stream(stub)
        await stream.send(infer_request(request_id="0", **LONG))
        await held(service)
        await stream.send(
            infer_request(request_id="1", **LONG), infer_request(request_id="2", **LONG)
        )
        await until(lambda: len(service._engine._inbox) == 2)
        service.gate.open()
        responses = await stream.end()
    errors = {name: ones[-1].error_message for name, ones in responses.items()}
    assert "try again" in errors.pop("2")
    assert not any(errors.values())


@in_loop
async def test_idle_stream_does_not_hold_up_the_end() -> None:
    """Clients keep a stream open for as long as they live."""
    from ortolan.runtime.serve.grpc_server import GrpcServer

    service = TextMock()
    server = GrpcServer(service, "127.0.0.1", 0)
    port = await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stream = Stream(GRPCInferenceServiceStub(channel))
        await stream.send(infer_request(request_id="1", **LONG))
        await stream.call.read()
        await service.drain(0)
        await asyncio.wait_for(server.stop(3600), 30)
        code, _ = await failure_code(stream.call)
        assert code in (CODE.UNAVAILABLE, CODE.CANCELLED)


@in_loop
async def test_requests_on_a_stream_are_told_of_a_shutdown() -> None:
    async with mocked() as (service, stub):
        service.hold()
        stream = Stream(stub)
        await stream.send(infer_request(request_id="1", **LONG))
        await held(service)
        draining = asyncio.ensure_future(service.drain(0))
        await until(lambda: service._engine._closing)
        service.gate.open()
        await draining
        await stream.send(infer_request(request_id="2", **LONG))
        responses = await stream.end()
    assert all("engine" in responses[name][-1].error_message for name in "12")


@in_loop
async def test_unread_stream_holds_back_its_own_requests_only() -> None:
    """vllm#56094: what one client does not read takes no memory without end."""
    async with mocked() as (service, stub):
        stream = Stream(stub)
        text = "x"
        for index in range(300):
            await asyncio.wait_for(
                stream.send(infer_request(text=text, request_id=str(index), max_tokens=1)), 10
            )
        responses = await stream.end()
        assert len(responses) == 300
        assert not service._engine.busy
