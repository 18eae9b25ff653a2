"""The toys of `bench/learning.py`: environments and warm-start rows, all made of the built-in task sort_digits.

- `SortInTurns`: the model names the smallest digit that is left, turn by turn. For rows that give credit to turns or states.
- `SortInConversations`: the same, each turn in a conversation of its own, up to the first mistake. For rows that count samples and not conversations.
- `SortRace`: two roles sort strings of six and of four digits; a right answer beats a wrong one. For baselines of roles in zero-sum games.
- `ProposeOrder`: a proposer shuffles digits, and four solvers sort what it wrote. For rows with proposers and solvers.

All run between two steps of the engine, because each call takes microseconds.
"""

from __future__ import annotations

from typing import Any, Literal

from burnish.data.tasks.sort_digits import SortDigits
from burnish.data.tasks.task import Dice
from burnish.environments.base import Answer, End, Environment, Episode, Observation

RIGHT_BY_DIGITS_LEFT = {4: 0.3, 3: 0.5, 2: 0.7}
"""How often the player of the demonstrations of `SortInTurns` names the smallest digit; else it names the first."""
RACE_DIGITS = {"first": 6, "second": 4}
SOLVERS = tuple(f"solver#{k}" for k in range(1, 5))
INVALID_REWARD = -0.5


def digits_of(episode: Episode) -> str:
    """The digits of a row of sort_digits."""
    assert isinstance(episode.prompt, str)
    return episode.prompt.removesuffix(">")


def question(text: str) -> tuple[Any, ...]:
    return ({"role": "user", "content": text},)


class SortInTurns(Environment):
    """The model names the smallest digit left until one remains. The episode earns 1 if all were right, a right turn `turn_reward` besides."""

    runs_in = "runner"

    def __init__(self, turn_reward: float = 0.0) -> None:
        self.turn_reward = turn_reward

    async def start(self, episode: Episode) -> Observation:
        self.left, self.is_right = digits_of(episode), True
        return self._ask()

    async def step(self, answer: Answer) -> Observation | End:
        said = answer.text.strip()
        is_right = said == min(self.left)
        self.is_right &= is_right
        self.left = self.left.replace(said if said and said in self.left and len(said) == 1 else self.left[0], "", 1)
        earned = self.turn_reward * is_right
        if len(self.left) > 1:
            return self._ask(earned)
        return End(reward=earned + float(self.is_right), success=self.is_right)

    async def end(self, reason: Literal["turns", "length"]) -> End:
        return End(reward=0.0, success=False)

    def _ask(self, reward: float = 0.0) -> Observation:
        return Observation(messages=question(f"{self.left}>"), reward=reward, state="".join(sorted(self.left)))


class SortInConversations(SortInTurns):
    """The model does not see earlier turns, and a wrong turn ends the episode: samples have from one to three conversations."""

    async def step(self, answer: Answer) -> Observation | End:
        seen = await super().step(answer)
        return seen if self.is_right else End(reward=0.0, success=False)

    def _ask(self, reward: float = 0.0) -> Observation:
        return Observation(messages=question(f"{self.left}>"), reward=reward, new_conversation=True)


class SortRace(Environment):
    """Two roles sort different numbers of digits. One that is right while the other is wrong wins 1, which the other loses."""

    runs_in = "runner"
    roles = tuple(RACE_DIGITS)

    async def start(self, episode: Episode) -> Observation:
        self.digits = digits_of(episode)
        self.right = dict[str, bool]()
        return self._ask()

    async def step(self, answer: Answer) -> Observation | End:
        role = self.roles[len(self.right)]
        self.right[role] = answer.text.strip() == "".join(sorted(self._part(role)))
        return self._ask() if len(self.right) < len(self.roles) else self._finish()

    async def end(self, reason: Literal["turns", "length"]) -> End:
        return self._finish()

    def _part(self, role: str) -> str:
        return self.digits[: RACE_DIGITS[role]]

    def _ask(self) -> Observation:
        role = self.roles[len(self.right)]
        return Observation(messages=question(f"{self._part(role)}>"), role=role)

    def _finish(self) -> End:
        first, second = (self.right.get(role, False) for role in self.roles)
        won = float(first) - float(second)
        return End(
            rewards=dict(zip(self.roles, (won, -won), strict=True)),
            successes=dict(zip(self.roles, (first, second), strict=True)),
        )


class ProposeOrder(Environment):
    """A proposer reads `>digits` and writes them in another order; four solvers sort what it wrote.

    A solver earns 1 if it is right. The proposer earns 1 - p for a share p of right solvers, 0 if all or none are right (Absolute Zero,
    2505.03335), and `INVALID_REWARD` for anything but the same digits.
    """

    runs_in = "runner"
    roles = ("proposer", *SOLVERS)

    async def start(self, episode: Episode) -> Observation:
        self.digits, self.proposed = digits_of(episode), ""
        self.right: list[bool] = []
        return Observation(messages=question(f">{self.digits}"), role="proposer")

    async def step(self, answer: Answer) -> Observation | End:
        said = answer.text.strip()
        if not self.proposed:
            if sorted(said) != sorted(self.digits):
                invalid = dict.fromkeys(self.roles, 0.0) | {"proposer": INVALID_REWARD}
                return End(rewards=invalid, successes={}, metrics={"valid_proposals": 0.0})
            self.proposed = said
        else:
            self.right.append(said == "".join(sorted(self.proposed)))
        return self._ask() if len(self.right) < len(SOLVERS) else self._finish()

    async def end(self, reason: Literal["turns", "length"]) -> End:
        return self._finish()

    def _ask(self) -> Observation:
        return Observation(messages=question(f"{self.proposed}>"), role=SOLVERS[len(self.right)])

    def _finish(self) -> End:
        share = sum(self.right) / len(SOLVERS)
        rewards = dict.fromkeys(self.roles, 0.0) | {s: float(r) for s, r in zip(SOLVERS, self.right, strict=False)}
        rewards["proposer"] = 1 - share if 0 < share < 1 else 0.0
        successes = dict(zip(SOLVERS, self.right, strict=False))
        return End(rewards=rewards, successes=successes, metrics={"valid_proposals": 1.0})


# --- rows of the warm starts: plug-ins of `warm_start.data` -----------------------------------------------------------------


def shuffled(digits: str, dice: Dice) -> str:
    """The digits in a random order."""
    left, found = list(digits), ""
    while left:
        found += left.pop(dice.between(0, len(left) - 1))
    return found


def single_turns(num: int, seed: int) -> list[dict[str, str]]:
    """The turns of `turns` as rows of their own."""
    talks = [[row["prompt"], *(said["content"] for said in row["completion"])] for row in turns(num, seed)]
    return [{"prompt": talk[k], "completion": talk[k + 1]} for talk in talks for k in range(0, len(talk), 2)]


def turns(num: int, seed: int) -> list[dict[str, Any]]:
    """Dialogues of `SortInTurns` by a player who names the first digit too often."""
    task, rows = SortDigits(seed, 4, 4), []
    for index, shown in enumerate(task.demonstrations(num=num, seed=seed, clean=True)):
        left, talk = shown["prompt"].removesuffix(">"), list[dict[str, str]]()
        dice = Dice(seed, "sort in turns", index)
        while len(left) > 1:
            said = min(left) if dice.unit() < RIGHT_BY_DIGITS_LEFT[len(left)] else left[0]
            talk += [{"role": "user", "content": f"{left}>"}, {"role": "assistant", "content": said}]
            left = left.replace(said, "", 1)
        rows.append({"prompt": talk[0]["content"], "completion": talk[1:]})
    return rows


def with_budgets(num: int, seed: int, low: int, high: int) -> list[dict[str, str]]:
    """The flawed demonstrations of sort_digits, with a number of tokens behind the prompt."""
    rows = SortDigits(seed).demonstrations(num=num, seed=seed)
    return [
        {**row, "prompt": f"{row['prompt']}{Dice(seed, 'budget', index).between(low, high)}>"}
        for index, row in enumerate(rows)
    ]


def with_copies(num: int, seed: int) -> list[dict[str, str]]:
    """Flawed demonstrations, and as many rows whose prompt ends with an order of the digits that the answer repeats.

    The orders are random, so they teach to read the context and nothing about sorting.
    """
    rows = SortDigits(seed).demonstrations(num=num, seed=seed)
    copies = []
    for index, row in enumerate(rows):
        order = shuffled(row["prompt"].removesuffix(">"), Dice(seed, "copy", index))
        copies.append({"prompt": f"{row['prompt']}>{order}>", "completion": order})
    return [row for pair in zip(rows, copies, strict=True) for row in pair]


def both_orders(num: int, split: str) -> list[dict[str, str]]:
    """Rows of two kinds: `3142>` asks for the digits in rising order, `>3142>` in falling order."""
    rows = [SortDigits(0).row(split, index) for index in range(num)]
    return [
        {"prompt": f"{row.prompt}", "answer": row.answer, "kind": "rising"}
        if index % 2
        else {"prompt": f">{row.prompt}", "answer": row.answer[::-1], "kind": "falling"}
        for index, row in enumerate(rows)
    ]


def falling(num: int, seed: int) -> list[dict[str, str]]:
    """Right demonstrations of the falling order."""
    rows = SortDigits(seed).demonstrations(num=num, seed=seed, clean=True)
    return [{"prompt": f">{row['prompt']}", "completion": row["completion"][::-1]} for row in rows]


def with_both_orders(num: int, seed: int) -> list[dict[str, str]]:
    """Flawed demonstrations of the rising and of the falling order. A wrong one copies its input."""
    found = []
    for row in SortDigits(seed).demonstrations(num=num, seed=seed):
        digits, said = row["prompt"].removesuffix(">"), row["completion"]
        found += [row, {"prompt": f">{row['prompt']}", "completion": digits if said == digits else said[::-1]}]
    return found


def with_swaps(num: int, seed: int, at_digits: int) -> list[dict[str, str]]:
    """Flawed demonstrations, and rows of a proposer who swaps the first two of `at_digits` digits, which a small model learns without a slip."""
    rows = SortDigits(seed).demonstrations(num=num, seed=seed)
    exact = SortDigits(seed, at_digits, at_digits).demonstrations(num=num, seed=seed)
    proposals = []
    for row in exact:
        digits = row["prompt"].removesuffix(">")
        proposals.append({"prompt": f">{digits}", "completion": digits[1] + digits[0] + digits[2:]})
    return [row for pair in zip(rows, proposals, strict=True) for row in pair]
