"""langchain, instructor and pydantic-ai: they use tools to get objects, whatever the template."""

from __future__ import annotations

import asyncio
from typing import Literal

import openai
import pydantic
import pytest

from tests.clients.doors import http_library


class Weather(pydantic.BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "London"]
    is_sunny: bool


QUESTION = "Is it sunny in Paris?"
MODEL = "any"
HTTP = http_library(openai)


def client_of(door) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{door.url}/v1", api_key=door.key, max_retries=0, http_client=door.http(HTTP)
    )


@pytest.fixture
def langchain(door):
    langchain_openai = pytest.importorskip("langchain_openai", reason="langchain-openai")
    return langchain_openai.ChatOpenAI(
        base_url=f"{door.url}/v1", api_key=door.key, model=MODEL, temperature=0, max_tokens=60,
        max_retries=0, http_client=door.http(HTTP), http_async_client=door.async_http(HTTP),
    )  # fmt: skip


def test_langchain_answers(langchain):
    question = "What is the capital city of Germany?"
    assert "Berlin" in langchain.invoke(question).content
    pieces = [one.content for one in langchain.stream(question)]
    assert len(pieces) > 2
    assert "Berlin" in "".join(pieces)


def test_langchain_calls_a_tool_that_is_bound(langchain):
    bound = langchain.bind_tools([Weather], tool_choice="any", parallel_tool_calls=False)
    (call,) = bound.invoke(QUESTION).tool_calls
    assert Weather(**call["args"])
    whole = None
    for chunk in bound.stream(QUESTION):
        whole = chunk if whole is None else whole + chunk
    (call,) = whole.tool_calls
    assert Weather(**call["args"])


def test_langchain_offers_tools_and_reads_what_comes(langchain):
    """The model may answer without a call; what it must not be is an error."""
    reply = langchain.bind_tools([Weather]).invoke(QUESTION)
    assert reply.content or reply.tool_calls


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_langchain_makes_objects(langchain, method):
    made = langchain.with_structured_output(Weather, method=method).invoke(QUESTION)
    assert isinstance(made, Weather)


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"])
def test_instructor_makes_objects(door, mode):
    instructor = pytest.importorskip("instructor", reason="instructor")
    client = instructor.from_openai(client_of(door), mode=getattr(instructor.Mode, mode))
    made = client.chat.completions.create(
        model=MODEL, response_model=Weather, max_retries=0, temperature=0, max_tokens=80,
        messages=[{"role": "user", "content": QUESTION}],
    )  # fmt: skip
    assert isinstance(made, Weather)


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_pydantic_ai_makes_objects_and_offers_tools(door, is_streamed):
    pydantic_ai = pytest.importorskip("pydantic_ai", reason="pydantic-ai-slim[openai]")
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    async def ask():
        async with door.async_http(HTTP) as http:
            client = openai.AsyncOpenAI(
                base_url=f"{door.url}/v1", api_key=door.key, max_retries=0, http_client=http
            )
            model = OpenAIChatModel(MODEL, provider=OpenAIProvider(openai_client=client))
            settings = {"temperature": 0, "max_tokens": 80, "parallel_tool_calls": False}
            agent = pydantic_ai.Agent(model, output_type=Weather, model_settings=settings)
            if not is_streamed:
                return (await agent.run(QUESTION)).output
            async with agent.run_stream(QUESTION) as stream:
                return await stream.get_output()

    assert isinstance(asyncio.run(ask()), Weather)


def test_pydantic_ai_with_tools_and_a_text(door):
    pydantic_ai = pytest.importorskip("pydantic_ai", reason="pydantic-ai-slim[openai]")
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    async def ask():
        async with door.async_http(HTTP) as http:
            client = openai.AsyncOpenAI(
                base_url=f"{door.url}/v1", api_key=door.key, max_retries=0, http_client=http
            )
            model = OpenAIChatModel(MODEL, provider=OpenAIProvider(openai_client=client))
            agent = pydantic_ai.Agent(model, model_settings={"temperature": 0, "max_tokens": 60})

            @agent.tool_plain
            def get_weather(city: str) -> str:
                """The weather of a city."""
                return f"sunny in {city}"

            return (await agent.run("What is the capital city of Germany?")).output

    assert asyncio.run(ask())
