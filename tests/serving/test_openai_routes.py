"""OpenAI's dialect as TGI speaks it: chat, tools, formats, completions, streams."""

import json

import pytest

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a contract?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"$ref": "#/$defs/Days"}},
            "required": ["city", "days"],
            "$defs": {"Days": {"type": "integer", "minimum": 1, "maximum": 7}},
        },
    },
}
TIME = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}


def chunks(response):
    """The events of a stream in the OpenAI dialect, without the closing [DONE]."""
    assert response.status_code == 200
    frames = [frame[6:] for frame in response.text.split("\n\n") if frame.startswith("data: ")]
    assert frames[-1] == "[DONE]"
    return [json.loads(frame) for frame in frames[:-1]]


@pytest.fixture
def chat(server):
    def post(**body):
        return server.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 8, **body})

    return post


def test_chat_applies_the_template_and_is_greedy_at_temperature_0(chat, greedy, reference):
    tokenizer = reference[1]
    prompt = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    body = chat(temperature=0, ignore_eos=True).json()
    (choice,) = body["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": tokenizer.decode(greedy(prompt, 8, special=False), skip_special_tokens=True),
    }
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"] is None
    prompt_tokens = len(tokenizer(prompt, add_special_tokens=False).input_ids)
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt_tokens, 8)
    assert usage["total_tokens"] == prompt_tokens + 8
    assert body["object"] == "chat.completion"
    assert body["brownout"]["browned"] is False


def test_chat_stream_says_the_same_and_closes_with_usage(chat):
    whole = chat(temperature=0).json()
    stream = chunks(chat(temperature=0, stream=True, stream_options={"include_usage": True}))
    text = "".join(c["choices"][0]["delta"]["content"] for c in stream if c["choices"])
    assert text == whole["choices"][0]["message"]["content"]
    assert all(c["object"] == "chat.completion.chunk" for c in stream)
    assert [c["usage"] is None for c in stream] == [True] * (len(stream) - 1) + [False]
    assert stream[-1]["choices"] == []
    assert stream[-1]["usage"] == whole["usage"] | {
        "prompt_tokens_details": stream[-1]["usage"]["prompt_tokens_details"]
    }
    assert stream[-2]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]


def test_chat_logprobs(chat):
    content = chat(temperature=0, logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]
    assert len(content) == 8
    for entry in content:  # greedy: the chosen token is the likeliest
        assert len(entry["top_logprobs"]) == 2
        assert entry["logprob"] == pytest.approx(entry["top_logprobs"][0]["logprob"])
        assert entry["logprob"] <= 0
    assert chat(top_logprobs=2).status_code == 422


def test_presence_penalty_is_tgis_repetition_penalty(server, chat, reference):
    prompt = reference[1].apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    prompt_ids = reference[1](prompt, add_special_tokens=False).input_ids
    by_chat = chat(temperature=0, presence_penalty=-0.5).json()["choices"][0]["message"]["content"]
    ids = server.post("/v1/completions", {"prompt": [prompt_ids], "max_tokens": 8, "temperature": 0,
                                          "repetition_penalty": 1.5}).json()  # fmt: skip
    assert by_chat == ids["choices"][0]["text"]


def test_content_may_come_in_parts_but_not_as_an_image(chat):
    parts = [{"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "law?"}]}]
    whole = [{"role": "user", "content": "What is law?"}]
    first, second = (chat(messages=m, temperature=0).json()["choices"][0]["message"] for m in (parts, whole))
    assert first == second
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a/b.png"}}]}]
    assert chat(messages=image).json()["error"] == (
        "Input validation error: image modality is not supported by this model"
    )


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}, "get_weather"]
)
def test_a_required_tool_is_called_with_valid_arguments(chat, choice):
    tools = [WEATHER] if choice == "required" else [WEATHER, TIME]
    body = chat(tools=tools, tool_choice=choice, max_tokens=60).json()
    message = body["choices"][0]["message"]
    assert "content" not in message
    (call,) = message["tool_calls"]
    assert (call["type"], call["function"]["name"]) == ("function", "get_weather")
    arguments = json.loads(call["function"]["arguments"])
    assert arguments["city"] in ("Paris", "Rome")
    assert 1 <= arguments["days"] <= 7


def test_a_streamed_tool_call_assembles_to_valid_arguments(chat):
    stream = chunks(chat(tools=[WEATHER], tool_choice="required", max_tokens=60, stream=True))
    calls = [c["choices"][0]["delta"].get("tool_calls") for c in stream]
    parts = [call[0] for call in calls if call]
    assert parts[0]["function"]["name"] == "get_weather"
    assert all(part["function"]["name"] is None for part in parts[1:])
    assert len({part["id"] for part in parts}) == 1
    assert json.loads("".join(part["function"]["arguments"] for part in parts))["city"] in ("Paris", "Rome")
    assert stream[-1]["choices"][0]["finish_reason"] == "stop"


def test_tool_choice_auto_answers_in_text_or_with_a_call_and_none_in_text(chat):
    for stream in (False, True):
        response = chat(tools=[TIME], temperature=0, stream=stream, max_tokens=40)
        assert response.status_code == 200
        if not stream:
            message = response.json()["choices"][0]["message"]
            assert ("content" in message) != ("tool_calls" in message)
    message = chat(tools=[TIME], tool_choice="none", temperature=0).json()["choices"][0]["message"]
    assert message == chat(temperature=0).json()["choices"][0]["message"]


def test_tool_errors(chat):
    missing = chat(tools=[TIME], tool_choice={"type": "function", "function": {"name": "nope"}})
    assert (missing.status_code, missing.json()["error_type"]) == (422, "tool_error")
    both = chat(tools=[TIME], response_format={"type": "json_object"})
    assert both.json() == {"error": "Tool error: Grammar and tools are mutually exclusive", "error_type": "tool_error"}
    cut = chat(tools=[WEATHER], tool_choice="required", max_tokens=3)
    assert (cut.status_code, cut.json()["error_type"]) == (422, "tool_error")


@pytest.mark.parametrize("spelling", ["value", "json_schema"])
def test_response_format_constrains_the_answer(chat, spelling):
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    format_ = {"type": "json_schema", spelling: {"name": "answer", "schema": schema}}
    text = chat(response_format=format_, max_tokens=30).json()["choices"][0]["message"]["content"]
    assert isinstance(json.loads(text)["ok"], bool)
    regex = {"type": "regex", "value": "(yes|no)"}
    assert chat(response_format=regex).json()["choices"][0]["message"]["content"] in ("yes", "no")
    plain = chat(response_format={"type": "text"}, temperature=0).json()["choices"][0]["message"]
    assert plain == chat(temperature=0).json()["choices"][0]["message"]


def test_errors_before_and_inside_a_stream(chat):
    response = chat(top_p=1.0)
    assert response.status_code == 422
    assert response.json()["error"] == "Input validation error: `top_p` must be > 0.0 and < 1.0"
    (event,) = chunks(chat(top_p=1.0, stream=True))
    assert event["error"]["message"] == response.json()["error"]
    assert event["error"]["http_status_code"] == 422
    # What is wrong before the stream begins keeps its status.
    assert chat(messages=[{"role": "user"}], stream=True).status_code == 422


def test_completions_answer_every_prompt(server, greedy, reference):
    prompts = ["The law says", "def main():"]
    body = {"prompt": prompts, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    answer = server.post("/v1/completions", body).json()
    expected = [reference[1].decode(greedy(prompt, 6), skip_special_tokens=True) for prompt in prompts]
    assert [choice["text"] for choice in answer["choices"]] == expected
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["usage"]["completion_tokens"] == 12
    assert answer["object"] == "text_completion"
    stream = chunks(server.post("/v1/completions", {**body, "stream": True}))
    for index, text in enumerate(expected):
        own = [c for c in stream if c["choices"][0]["index"] == index]
        assert "".join(c["choices"][0]["text"] for c in own) == text
        assert [c["choices"][0]["finish_reason"] for c in own] == [""] * (len(own) - 1) + ["length"]
        assert own[-1]["usage"]["completion_tokens"] == 6
    ids = [reference[1](prompt).input_ids for prompt in prompts]
    by_ids = server.post("/v1/completions", {**body, "prompt": ids}).json()
    assert [choice["text"] for choice in by_ids["choices"]] == expected


def test_completions_refusals(server):
    suffix = server.post("/v1/completions", {"prompt": "a", "suffix": "b"})
    assert (suffix.status_code, suffix.json()["error_type"]) == (422, "suffix not supported")
    many = server.post("/v1/completions", {"prompt": ["a"] * 5})
    assert many.json() == {
        "error": "Number of prompts exceeds the maximum allowed batch size of 4", "error_type": "batch size exceeded",
    }  # fmt: skip
    for prompt in ([], "", [[]], [10**6], [-1], [1.5], [["a"]]):
        assert server.post("/v1/completions", {"prompt": prompt}).status_code == 422


def test_chat_tokenize_shows_the_templated_prompt(server, reference):
    body = server.post("/chat_tokenize", {"messages": MESSAGES}).json()
    prompt = reference[1].apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert body["templated_text"] == prompt
    expected = reference[1](prompt, add_special_tokens=False).input_ids
    assert [token["id"] for token in body["tokenize_response"]] == expected
