"""Kuhn poker (Kuhn, 1950) in self-play, with the exact exploitability of a policy.

Three cards, J < Q < K; each of two players antes 1 and gets a card. The first player checks or bets 1. A bet is called or folded. After a
check the second player checks or bets, and the first player calls or folds. The higher card wins the pot. The game is zero-sum, and under
perfect play the first player loses 1/18 a game.

The model plays both players, each in a conversation of its own. An answer that is no legal action loses 2, the most one can lose. A policy
is the probability to bet or call in each of the 12 information sets, so `exploitability` measures a self-play run exactly.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Literal

from burnish.data.row import Message
from burnish.data.tasks.task import Dice
from burnish.environments.base import Answer, End, Episode, Observation
from burnish.environments.games.text_game import (
    Format,
    TextGame,
    answer_text,
    choice,
    format_sentence,
    read_answer,
    split_of,
    user_message,
    write_answer,
)

CARDS = ("J", "Q", "K")
DEALS = tuple(itertools.permutations(CARDS, 2))
"""The cards of (first, second) player."""
ROLES = ("first", "second")
HISTORIES = {"first": ("", "cb"), "second": ("c", "b")}
"""Histories in which a player decides: `c` check, `b` bet."""
INFORMATION_SETS = {role: tuple(card + h for card in CARDS for h in HISTORIES[role]) for role in ROLES}
"""A player's card and the history: `Q`, `Qcb` of the first player; `Qc`, `Qb` of the second."""
FORFEIT = 2

Policy = Mapping[str, float]
"""The probability to bet or call, by information set."""


def mover(history: str) -> str:
    """The player who decides after a history."""
    return "second" if history in HISTORIES["second"] else "first"


def legal_actions(history: str) -> tuple[str, str]:
    """The (passive, active) action after a history."""
    return ("fold", "call") if history.endswith("b") else ("check", "bet")


def payoff(deal: tuple[str, str], history: str) -> int | None:
    """What the first player wins; None while the game goes on. `f` is a fold, `k` a call."""
    sign = 1 if CARDS.index(deal[0]) > CARDS.index(deal[1]) else -1
    return {"cc": sign, "bf": 1, "bk": 2 * sign, "cbf": -1, "cbk": 2 * sign}.get(history)


LETTERS = {"check": "c", "bet": "b", "fold": "f", "call": "k"}


# --- Exact values -----------------------------------------------------------------------------------------------------------


def expected_value(first: Policy, second: Policy) -> float:
    """What the first player wins on average. Exact for policies of fractions."""
    return sum(_value(deal, "", first, second) for deal in DEALS) / len(DEALS)


def _value(deal: tuple[str, str], history: str, first: Policy, second: Policy) -> float:
    won = payoff(deal, history)
    if won is not None:
        return won
    is_first = mover(history) == "first"
    active = (first if is_first else second)[deal[0 if is_first else 1] + history]
    passive_action, active_action = legal_actions(history)
    return active * _value(deal, history + LETTERS[active_action], first, second) + (1 - active) * _value(
        deal, history + LETTERS[passive_action], first, second
    )


def best_response(policy: Policy, role: str) -> tuple[float, dict[str, float]]:
    """The most that `role` can win on average against the other player's part of a policy, and a pure policy that does."""
    keys = INFORMATION_SETS[role]
    best_value, best = float("-inf"), dict[str, float]()
    for bits in itertools.product((0, 1), repeat=len(keys)):
        response = dict(zip(keys, bits, strict=True))
        value = expected_value(response, policy) if role == "first" else -expected_value(policy, response)
        if value > best_value:
            best_value, best = value, {key: float(bit) for key, bit in response.items()}
    return best_value, best


def exploitability(policy: Policy) -> float:
    """The average of what a best response wins against each part of a policy; 0 exactly at an equilibrium."""
    return (best_response(policy, "first")[0] + best_response(policy, "second")[0]) / 2


def equilibrium(alpha: float = 1 / 3) -> dict[str, float]:
    """The equilibrium in which the first player bets a jack with probability `alpha`, from 0 to 1/3 (Kuhn, 1950)."""
    third = (alpha * 0 + 1) / 3  # a fraction if alpha is one
    first = {"J": alpha, "Q": 0, "K": 3 * alpha, "Jcb": 0, "Qcb": alpha + third, "Kcb": 1}
    return {**first, "Jc": third, "Qc": 0, "Kc": 1, "Jb": 0, "Qb": third, "Kb": 1}


# --- The game ---------------------------------------------------------------------------------------------------------------


class KuhnPoker(TextGame):
    """The model plays both sides of one deal of Kuhn poker."""

    name = "kuhn_poker"
    roles = ROLES
    gives_success = False

    def __init__(self, format: Format = "answer_tag", words: bool = True) -> None:
        super().__init__(format, words)

    async def start(self, episode: Episode) -> Observation:
        dice = Dice(self.name, split_of(episode), episode.seed)
        self.deal = choice(dice, DEALS)
        self.history = ""
        self._dice = dice
        return self._ask()

    async def step(self, answer: Answer) -> Observation | End:
        role = mover(self.history)
        action = (read_answer(answer, self.format) or "").lower()
        if action not in legal_actions(self.history):
            won = -FORFEIT if role == "first" else FORFEIT
            return self._finish(won, f"illegal answer of the {role} player", is_illegal=True)
        self.history += LETTERS[action]
        won_or_none = payoff(self.deal, self.history)
        if won_or_none is None:
            return self._ask()
        return self._finish(won_or_none, f"{self.deal[0]} {self.deal[1]} {self.history}")

    async def end(self, reason: Literal["turns", "length"]) -> End:
        return self._finish(0, "")

    def _finish(self, won: int, text: str, is_illegal: bool = False) -> End:
        metrics = {"illegal": float(is_illegal)}
        return End(rewards={"first": float(won), "second": float(-won)}, text=text, metrics=metrics)

    def _ask(self) -> Observation:
        role = mover(self.history)
        card = self.deal[ROLES.index(role)]
        message = user_message(self.question(card, self.history))
        return Observation(messages=(message,), role=role, state=card + self.history)

    def question(self, card: str, history: str) -> str:
        """What a player reads who holds a card after a history."""
        passive, active = legal_actions(history)
        if not self.words:
            return f"{card}{history} {passive} or {active}?"
        said = {
            "": "You begin.",
            "c": "The other player checked.",
            "b": "The other player bet 1.",
            "cb": "You checked, and the other player bet 1.",
        }[history]
        rules = (
            "Kuhn poker: the deck has three cards, J < Q < K. Each of the two players has put 1 into the pot and holds one card. A bet adds 1; "
            "the other player may call it, which adds 1, or fold, which gives up the pot. If neither folds, the higher card wins the pot. "
            "An illegal answer loses 2.\n\n"
        )
        state = f"You hold {card}. {said}\nActions: {passive}, {active}. {format_sentence(self.format)}"
        return state if history == "cb" else rules + state

    def information_set_messages(self) -> dict[str, list[Message]]:
        """The conversation that a player has read in each information set, to ask a model for its policy."""
        conversations = {}
        for role, keys in INFORMATION_SETS.items():
            for key in keys:
                card, history = key[0], key[1:]
                messages = [user_message(self.question(card, history))]
                if role == "first" and history:
                    checked = {"role": "assistant", "content": write_answer("check", self.format)}
                    messages = [user_message(self.question(card, "")), checked, *messages]
                conversations[key] = messages
        return conversations

    def policy_of_answers(self, answers: Mapping[str, Sequence[str]]) -> dict[str, float]:
        """The policy that sampled answers show: in each information set, the share of bets or calls among the legal answers.

        An information set without a legal answer counts as undecided, 1/2.
        """
        policy = {}
        for key in (key for keys in INFORMATION_SETS.values() for key in keys):
            legal = legal_actions(key[1:])
            read = [(answer_text(text, self.format) or "").lower() for text in answers[key]]
            chosen = [action for action in read if action in legal]
            policy[key] = chosen.count(legal[1]) / len(chosen) if chosen else 0.5
        return policy

    # Players.

    def random_answer(self, dice: Dice) -> str:
        return write_answer(choice(dice, legal_actions(self.history)), self.format)

    def best_answer(self) -> str:
        """An answer of an equilibrium, drawn from the episode's random numbers."""
        key = self.deal[ROLES.index(mover(self.history))] + self.history
        is_active = self._dice.unit() < equilibrium()[key]
        return write_answer(legal_actions(self.history)[is_active], self.format)
