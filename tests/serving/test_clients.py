"""The clients that people use, unchanged: huggingface_hub, text-generation and openai."""

import asyncio
import json

import huggingface_hub
import pytest

PROMPT = "A contract is an agreement"
MESSAGES = [{"role": "user", "content": "What is a contract?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look a word up",
        "parameters": {"type": "object", "properties": {"word": {"enum": ["law", "court"]}}, "required": ["word"]},
    },
}


@pytest.fixture(scope="module")
def expected(greedy, reference):
    """Greedy text of 6 tokens."""
    return reference[1].decode(greedy(PROMPT, 6), skip_special_tokens=True)


class TestHuggingFaceHub:
    @pytest.fixture(autouse=True)
    def _online(self, monkeypatch):
        """The suite forbids the Hub; this client refuses every address then, our own too."""
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)

    @pytest.fixture
    def client(self, server):
        return huggingface_hub.InferenceClient(server.url)

    def test_text_generation(self, client, expected):
        assert client.text_generation(PROMPT, max_new_tokens=6) == expected

    def test_details(self, client, expected):
        output = client.text_generation(PROMPT, max_new_tokens=6, details=True, decoder_input_details=True)
        assert output.generated_text == expected
        assert output.details.finish_reason == "length"
        assert len(output.details.tokens) == output.details.generated_tokens == 6
        assert output.details.prefill[0].logprob is None

    def test_stream(self, client, expected):
        assert "".join(client.text_generation(PROMPT, max_new_tokens=6, stream=True)) == expected
        *_, last = client.text_generation(PROMPT, max_new_tokens=6, stream=True, details=True)
        assert last.generated_text == expected
        assert last.details.input_length > 0

    def test_chat(self, client):
        answer = client.chat_completion(MESSAGES, max_tokens=6, temperature=0)
        stream = client.chat_completion(MESSAGES, max_tokens=6, temperature=0, stream=True)
        assert "".join(chunk.choices[0].delta.content for chunk in stream) == answer.choices[0].message.content
        assert answer.usage.completion_tokens == 6

    def test_tools(self, client):
        answer = client.chat_completion(MESSAGES, tools=[TOOL], tool_choice="required", max_tokens=40)
        call = answer.choices[0].message.tool_calls[0]
        assert call.function.name == "lookup"
        assert json.loads(call.function.arguments)["word"] in ("law", "court")

    def test_errors_have_their_own_classes(self, client):
        with pytest.raises(huggingface_hub.errors.ValidationError):
            client.text_generation(PROMPT, max_new_tokens=10_000)
        with pytest.raises(huggingface_hub.errors.ValidationError):
            list(client.text_generation(PROMPT, max_new_tokens=10_000, stream=True))

    def test_async(self, server, expected):
        async def main():
            client = huggingface_hub.AsyncInferenceClient(server.url)
            whole = await client.text_generation(PROMPT, max_new_tokens=6)
            pieces = [piece async for piece in await client.text_generation(PROMPT, max_new_tokens=6, stream=True)]
            return whole, "".join(pieces)

        assert asyncio.run(main()) == (expected, expected)


@pytest.fixture(scope="module")
def library():
    return pytest.importorskip("text_generation")


@pytest.fixture(scope="module")
def first(greedy, reference):
    """Id and text of the first greedy token after "test"."""
    (token,) = greedy("test", 1)
    return token, reference[1].decode([token])


@pytest.mark.filterwarnings("ignore:The `dict` method is deprecated")
class TestTextGeneration:
    """The cases of the client's own test suite, with expectations from our model."""

    def _check(self, response, first):
        from text_generation.types import FinishReason

        assert response.generated_text == first[1]
        assert response.details.finish_reason == FinishReason.Length
        assert response.details.generated_tokens == 1
        assert response.details.seed is None

    def test_generate(self, library, server, first, reference):
        response = library.Client(server.url).generate("test", max_new_tokens=1, decoder_input_details=True)
        self._check(response, first)
        assert [token.id for token in response.details.prefill] == reference[1]("test").input_ids
        (token,) = response.details.tokens
        assert (token.id, token.text, token.special) == (*first, False)
        assert token.logprob < 0

    def test_generate_best_of(self, library, server):
        response = library.Client(server.url).generate(
            "test", max_new_tokens=1, best_of=2, do_sample=True, decoder_input_details=True
        )
        assert response.details.seed is not None
        assert response.details.best_of_sequences[0].seed is not None

    def test_generate_not_found(self, library, server):
        from text_generation.errors import NotFoundError

        client = library.Client(server.url + "/fake/model")
        with pytest.raises(NotFoundError):
            client.generate("test")
        with pytest.raises(NotFoundError):
            list(client.generate_stream("test"))

    def test_generate_validation_error(self, library, server):
        from text_generation.errors import ValidationError

        client = library.Client(server.url)
        with pytest.raises(ValidationError):
            client.generate("test", max_new_tokens=10_000)
        with pytest.raises(ValidationError):
            list(client.generate_stream("test", max_new_tokens=10_000))

    def test_generate_stream(self, library, server, first):
        (response,) = library.Client(server.url).generate_stream("test", max_new_tokens=1)
        self._check(response, first)

    def test_chat(self, library, server):
        client = library.Client(server.url)
        answer = client.chat(MESSAGES, max_tokens=6, temperature=0.0)
        stream = client.chat(MESSAGES, max_tokens=6, temperature=0.0, stream=True)
        text = "".join(chunk.choices[0].delta.content for chunk in stream)
        assert text == answer.choices[0].message.content

    def test_async_client(self, library, server, first):
        from text_generation.errors import NotFoundError, ValidationError

        async def main():
            client = library.AsyncClient(server.url)
            self._check(await client.generate("test", max_new_tokens=1), first)
            (response,) = [r async for r in client.generate_stream("test", max_new_tokens=1)]
            self._check(response, first)
            fake = library.AsyncClient(server.url + "/fake/model")
            with pytest.raises(NotFoundError):
                await fake.generate("test")
            with pytest.raises(NotFoundError):
                async for _ in fake.generate_stream("test"):
                    pass
            with pytest.raises(ValidationError):
                await client.generate("test", max_new_tokens=10_000)
            with pytest.raises(ValidationError):
                async for _ in client.generate_stream("test", max_new_tokens=10_000):
                    pass
            stream = await client.chat(MESSAGES, max_tokens=4, temperature=0.0, stream=True)
            return [chunk.choices[0].delta.content async for chunk in stream]

        assert len(asyncio.run(main())) == 4


class TestOpenAI:
    @pytest.fixture
    def client(self, server):
        openai = pytest.importorskip("openai")
        return openai.OpenAI(base_url=server.url + "/v1", api_key="-", max_retries=0)

    def test_completion(self, client, expected):
        body = {"model": "tgi", "prompt": PROMPT, "max_tokens": 6, "temperature": 0}
        assert client.completions.create(**body).choices[0].text == expected
        stream = client.completions.create(**body, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == expected

    def test_chat(self, client):
        body = {"model": "tgi", "messages": MESSAGES, "max_tokens": 6, "temperature": 0}
        answer = client.chat.completions.create(**body, logprobs=True, top_logprobs=2)
        assert len(answer.choices[0].logprobs.content) == 6
        stream = list(client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}))
        text = "".join(chunk.choices[0].delta.content for chunk in stream if chunk.choices)
        assert text == answer.choices[0].message.content
        assert stream[-1].usage.completion_tokens == 6

    def test_tools(self, client):
        body = {"model": "tgi", "messages": MESSAGES, "max_tokens": 40, "tools": [TOOL], "tool_choice": "required"}
        call = client.chat.completions.create(**body).choices[0].message.tool_calls[0]
        assert json.loads(call.function.arguments)["word"] in ("law", "court")
        stream = client.chat.completions.create(**body, stream=True)
        parts = [c.choices[0].delta.tool_calls[0].function for c in stream if c.choices[0].delta.tool_calls]
        assert parts[0].name == "lookup"
        assert json.loads("".join(part.arguments for part in parts))["word"] in ("law", "court")

    def test_errors(self, client):
        import openai

        body = {"model": "tgi", "messages": MESSAGES, "top_p": 1.0}
        with pytest.raises(openai.UnprocessableEntityError):
            client.chat.completions.create(**body)
        with pytest.raises(openai.APIError, match="top_p"):
            list(client.chat.completions.create(**body, stream=True))

    def test_models_and_extra_parameters(self, client):
        (model,) = client.models.list().data
        answer = client.completions.create(model=model.id, prompt=PROMPT, max_tokens=2, extra_body={"exact": True})
        assert answer.brownout["browned"] is False
