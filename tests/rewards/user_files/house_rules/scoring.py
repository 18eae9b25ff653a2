"""A reward inside a package, with a relative import."""

from tests.rewards.user_files.house_rules.digits import ODD


def odd_digits(completions, **kwargs):
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [0.001 * sum(text.count(digit) for digit in ODD) for text in texts]
