"""A scripted language model behind the `Engine` protocol.

Next-character probabilities are a function of the text so far, or the replies to every text are given in order.
"""

import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from burnish.core.engine import Completion, Request, SamplingOptions
from burnish.core.random_keys import fold, uniform_from_key
from burnish.environments.dialogue import ChatRenderer
from burnish.evaluation.strategies.registry import load_strategy, strategy_record
from burnish.evaluation.strategies.search import Question, Search
from burnish.evaluation.strategies.search_program import SearchProgram
from burnish.evaluation.strategies.search_tree import mean_logp
from burnish.models.tokenizer import Tokenizer
from burnish.rewards.score_types import Score

ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ =+-*?.,:;!#()[]<>/\\{}\n"
END = "$"
"""Stands for the end token in the distributions of a toy model."""
TURNS = "{% for m in messages %}{% if m.role == 'user' %}{{ '<' + m.content + '>:' }}{% else %}{{ m.content + '<eos>' }}{% endif %}{% endfor %}"
"""A chat template: `<question>:answer`, and an end token behind each answer."""
NextCharacter = Callable[[str], Mapping[str, float]]
Replies = Mapping[str, Sequence[str | tuple[str, float]]]
"""The replies to every text behind the prompt, in the order in which they are asked for. A number is the log-prob of every token."""


def toy_tokenizer(chat_template: str | None = None, marks: Sequence[str] = ()) -> Tokenizer:
    """A character tokenizer with an end token."""
    return Tokenizer.from_characters(ALPHABET, marks, chat_template)


class ToyEngine:
    """Samples from `model`: a function from the text so far to the probabilities of the next character, or the replies themselves."""

    def __init__(self, tokenizer: Tokenizer, model: NextCharacter | Replies) -> None:
        self.tokenizer, self.model = tokenizer, model
        self.num_replies = Counter[str]()
        self.waiting: deque[Request] = deque()
        self.seen: list[Request] = []

    def submit(self, requests: Sequence[Request]) -> None:
        self.waiting += requests
        self.seen += requests

    def stream(self) -> Iterator[Completion]:
        while self.waiting:
            yield self._complete(self.waiting.popleft())

    def abort(self, ids: Iterable[str], keep: bool) -> list[Completion]:
        gone = set(ids)
        self.waiting = deque(r for r in self.waiting if r.id not in gone)
        return []

    def _reply(self, request: Request, text: str, model: Replies) -> Completion:
        """Return the next reply to a text. `$` at its end stands for the end token."""
        place = text[1:]  # without the prompt, which is one character
        given = model[place][self.num_replies[place]]
        self.num_replies[place] += 1
        reply, logp = (given, -1.0) if isinstance(given, str) else given
        tokens = self.tokenizer.encode(reply.removesuffix(END)) + [self.tokenizer.eos_ids[0]] * reply.endswith(END)
        tokens = tokens[: request.sampling.max_tokens]
        return Completion(request.id, np.array(tokens), np.full(len(tokens), logp, dtype=np.float32), "stop", version=0)

    def _complete(self, request: Request) -> Completion:
        options, end = request.sampling, self.tokenizer.eos_ids[0]
        text = "".join(self.tokenizer.pieces(request.tokens, skip_special=False))
        if isinstance(self.model, Mapping):
            return self._reply(request, text, self.model)
        tokens, logp, finish, written = [], [], "length", ""
        while len(tokens) < options.max_tokens:
            chances = self.model(text + written)
            names, weights = list(chances), np.array(list(chances.values()), dtype=np.float64)
            weights /= weights.sum()
            if options.temperature == 0:
                pick = int(weights.argmax())
            else:
                scaled = weights ** (1 / options.temperature)
                u = uniform_from_key(fold(request.key, len(tokens)))
                pick = int(np.searchsorted(np.cumsum(scaled / scaled.sum()), u, side="right").clip(0, len(names) - 1))
            logp.append(float(np.log(weights[pick])))
            if names[pick] == END:
                tokens.append(end)
                finish = "stop"
                break
            tokens += self.tokenizer.encode(names[pick])
            if tokens[-1] in options.stop_tokens:
                finish = "stop"
                break
            written += names[pick]
            if any(stop in written for stop in options.stop):
                finish = "stop"
                break
        return Completion(
            request.id, np.array(tokens, dtype=np.int64), np.array(logp, dtype=np.float32), finish, version=0
        )


def sampling(tokenizer: Tokenizer, max_tokens: int = 64, temperature: float = 1.0) -> SamplingOptions:
    """Sampling options with the tokenizer's end token."""
    return SamplingOptions(temperature=temperature, max_tokens=max_tokens, stop_tokens=tokenizer.eos_ids)


def solve(
    strategy: str,
    model: NextCharacter | Replies,
    prompt: str = "?",
    score: Callable[[str], float | None] | None = None,
    kind: str = "exact",
    seed: int = 0,
    number: int = 0,
    max_tokens: int = 64,
    budget: int | None = None,
    chat: str | None = None,
    marks: Sequence[str] = (),
    details: Callable[[str], str] | None = None,
    shuffle: int | None = None,
    seen: list[Request] | None = None,
    **options: object,
) -> tuple[Search, SearchProgram]:
    """Run a strategy on one question by hand. `score` is the verifier: a function of the text; by default, likelihood.

    `chat` is a chat template, `marks` are control tokens, and `details` is what the verifier says of a text besides its score. With
    `shuffle`, completions and scores come in an order that this seed determines. `seen` collects the requests.
    """
    tokenizer = toy_tokenizer(chat, marks)
    engine = ToyEngine(tokenizer, model)
    renderer = None if chat is None else ChatRenderer(tokenizer)
    tokens = tuple(tokenizer.encode(prompt)) if renderer is None else renderer.open(prompt).tokens
    question = Question(f"q{prompt}", prompt, tokens, kind, chat=renderer)
    search = Search(
        question,
        tokenizer,
        sampling(tokenizer, max_tokens),
        seed,
        number,
        budget,
        log_scores=score is None,
    )
    program = SearchProgram(search, load_strategy(strategy_record(strategy, **options))(search))
    order = random.Random(shuffle)
    for _ in range(10_000):
        if seen is not None:
            seen[:] = engine.seen
        if program.is_done:
            return search, program
        engine.submit(program.requests())
        completions, requests = list(engine.stream()), program.score_requests()
        if shuffle is not None:
            order.shuffle(completions)
            order.shuffle(requests)
        for completion in completions:
            program.take(completion)
            engine.submit(program.requests())
        for request in requests:
            node = search.nodes[int(request.id.rpartition("/")[2])]
            assert request.answer is None
            assert not request.extra
            value = mean_logp(node) if score is None else score(request.completion)
            said = {} if details is None else {"toy": details(request.completion)}
            program.take_score(Score(request.id, value, None, details=said))
    raise AssertionError("the strategy does not end")
