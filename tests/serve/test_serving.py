"""`max serve` on the tiny checkpoint, asked through the OpenAI client."""

import base64
import io
import random
import re
import string
from concurrent.futures import ThreadPoolExecutor

import pytest
from numpy_qwen35 import Qwen35
from openai import BadRequestError
from PIL import Image
from serving import MAX_LENGTH, SLOTS
from transformers import AutoTokenizer

from gdn_graph.serve.check import openai_client
from gdn_graph.serve.server import Server

pytestmark = pytest.mark.slow

PROMPT = "The quick brown fox"
# What MAX's KV cache keeps of a prompt for others to start from: whole pages of this many tokens.
PAGE = 128


class Client:
    """Asks for greedy text of an exact length; a tiny model's text has one character a token."""

    def __init__(self, server: Server) -> None:
        self.model = server.model
        self.api = openai_client(server, timeout=120)
        self.tokenizer = AutoTokenizer.from_pretrained(server.model)
        self.greedy = {"temperature": 0, "extra_body": {"ignore_eos": True}}

    def complete(self, prompt: str, count: int) -> str:
        answer = self.api.completions.create(
            model=self.model, prompt=prompt, max_tokens=count, **self.greedy
        )
        assert answer.usage is not None and answer.usage.completion_tokens == count
        return answer.choices[0].text

    def is_greedy(self, oracle: Qwen35, prompt: str, text: str) -> bool:
        """Whether the NumPy forward continues `prompt` with `text`."""
        prompt_tokens, tokens = (self.tokenizer(part).input_ids for part in (prompt, text))
        return oracle.steps(prompt_tokens, tokens).argmax(-1).tolist() == tokens


@pytest.fixture(scope="module")
def client(server: Server) -> Client:
    return Client(server)


def test_completion_follows_the_numpy_forward(client: Client, oracle: Qwen35) -> None:
    text = client.complete(PROMPT, 64)
    assert len(text) == 64
    assert client.is_greedy(oracle, PROMPT, text)
    assert len(set(text)) > 20  # not one token over and over, which says nothing
    assert not client.is_greedy(oracle, PROMPT[1:], text)


def test_streamed_completion_is_the_same_text_in_pieces(client: Client) -> None:
    stream = client.api.completions.create(
        model=client.model, prompt=PROMPT, max_tokens=32, stream=True, **client.greedy
    )
    pieces = [chunk.choices[0].text for chunk in stream if chunk.choices]
    assert len([piece for piece in pieces if piece]) > 1
    assert "".join(pieces) == client.complete(PROMPT, 32)


def test_chat_follows_the_template(client: Client, oracle: Qwen35) -> None:
    messages = [
        {"role": "system", "content": "Answer."},
        {"role": "user", "content": PROMPT},
    ]
    answer = client.api.chat.completions.create(
        model=client.model, messages=messages, max_tokens=32, **client.greedy
    )
    prompt = client.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert client.is_greedy(oracle, prompt, answer.choices[0].message.content)
    assert answer.choices[0].finish_reason == "length"


def _requests() -> list[tuple[str, int]]:
    """20 requests of many lengths, of which some begin with the same pages."""
    rng = random.Random(0)

    def text(length: int) -> str:
        return "".join(rng.choices(string.ascii_letters + " ", k=length))

    shared = text(PAGE + 10)
    own = [(text(rng.randrange(1, 180)), rng.randrange(1, 48)) for _ in range(16)]
    return [*own, *((shared + text(length), 24) for length in (0, 1, 20, 40))]


def test_twenty_concurrent_requests_answer_as_alone(
    client: Client, server: Server, oracle: Qwen35
) -> None:
    """More requests than slots, so that slots are used again; in two orders.

    The log says that all slots were in use at once and that cached pages were started from.
    """
    requests = _requests()
    alone = {request: client.complete(*request) for request in requests}
    for (prompt, _), text in alone.items():
        assert client.is_greedy(oracle, prompt, text)
    for seed in (1, 2):
        random.Random(seed).shuffle(requests)
        with ThreadPoolExecutor(max_workers=20) as pool:
            answers = pool.map(lambda request: client.complete(*request), requests)
            assert dict(zip(requests, answers, strict=True)) == alone
    log = server.log.read_text()
    assert max(map(int, re.findall(r"TG batch with (\d+) reqs", log))) == SLOTS
    assert max(map(int, re.findall(r"\((\d+) hit, \d+ miss\)", log))) >= PAGE


def test_eight_concurrent_chats_of_different_lengths(client: Client) -> None:
    def chat(length: int) -> str | None:
        answer = client.api.chat.completions.create(
            model=client.model,
            messages=[{"role": "user", "content": "x" * length}],
            max_tokens=length,
            **client.greedy,
        )
        assert answer.usage is not None and answer.usage.completion_tokens == length
        return answer.choices[0].message.content

    lengths = [1, 5, 13, 24, 40, 61, 77, 90]
    alone = [chat(length) for length in lengths]
    with ThreadPoolExecutor(max_workers=8) as pool:
        assert list(pool.map(chat, lengths)) == alone


def test_request_longer_than_the_limit_is_refused(client: Client, oracle: Qwen35) -> None:
    with pytest.raises(BadRequestError, match=f"{MAX_LENGTH}"):
        client.complete("x" * (MAX_LENGTH + 1), 1)
    assert client.is_greedy(oracle, PROMPT, client.complete(PROMPT, 8))


def test_an_image_is_refused_on_a_cpu(client: Client, oracle: Qwen35) -> None:
    image = io.BytesIO()
    Image.new("RGB", (64, 64)).save(image, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(image.getvalue()).decode()}"
    content = [
        {"type": "text", "text": PROMPT},
        {"type": "image_url", "image_url": {"url": url}},
    ]
    with pytest.raises(BadRequestError, match="serves text only"):
        client.api.chat.completions.create(
            model=client.model, messages=[{"role": "user", "content": content}], max_tokens=8
        )
    assert client.is_greedy(oracle, PROMPT, client.complete(PROMPT, 8))


def test_cancelled_stream_leaves_the_others_alone(client: Client, oracle: Qwen35) -> None:
    """Cancels as many streams as there are slots, amid other requests, then uses them again."""
    with ThreadPoolExecutor(max_workers=4) as pool:
        others = [pool.submit(client.complete, PROMPT, 64) for _ in range(4)]
        for i in range(8):
            stream = client.api.completions.create(
                model=client.model,
                prompt="y" * (i + 1),
                max_tokens=200,
                stream=True,
                **client.greedy,
            )
            next(iter(stream))
            stream.close()
        texts = [other.result() for other in others]
    for prompt, text in [
        *((PROMPT, text) for text in texts),
        *((prompt, client.complete(prompt, 24)) for prompt in ("y", "yy", PROMPT)),
    ]:
        assert client.is_greedy(oracle, prompt, text)
