"""`burnish data reject COMPLETIONS|RUN OUT`: right completions as demonstrations for `burnish sft`."""

from __future__ import annotations

import argparse

from burnish.cli.data.options import add_output, add_samples


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from burnish.rewards.language_id import SCRIPTS

    add = parser.add_argument
    add_samples(parser)
    add_output(parser)
    add("--most", type=int, default=1, metavar="M", help="completions of one prompt at most (default 1)")
    add(
        "--pick",
        choices=("shortest", "random"),
        default="shortest",
        help="which of a prompt's right ones (default shortest)",
    )
    add("--seed", type=int, default=0, help="of --pick random (default 0)")
    add("--language", choices=sorted(" ".join(SCRIPTS.values()).split()), help="keep completions in this language")
    add("--purity", type=float, default=0.98, metavar="SHARE", help="words that must be of one script (default 0.98)")
    add(
        "--max-repeat",
        type=float,
        default=0.2,
        metavar="SHARE",
        help="runs of 8 words that may be repeats (default 0.2)",
    )
    add("--max-paragraph", type=int, metavar="WORDS", help="longest paragraph")
    add("--no-code", action="store_true", help="drop completions with blocks of code")


def run(args: argparse.Namespace) -> int:
    from burnish.cli.data import say, show
    from burnish.data.curation.output_files import aligned_table, summary
    from burnish.evaluation.rejection_sampling import RejectionOptions, write_demonstrations

    options = RejectionOptions(
        most=args.most,
        pick=args.pick,
        seed=args.seed,
        language=args.language,
        purity=args.purity,
        max_repeat=args.max_repeat,
        max_paragraph=args.max_paragraph,
        no_code=args.no_code,
    )
    manifest, is_new = write_demonstrations(args.source, args.out, options, args.prompts, args.force, say)
    show("\n".join(summary(manifest, args.out, is_new)))
    rows = [
        [
            what,
            f"{manifest[key]['completions']:,}",
            f"{manifest[key]['prompts']:,}",
            f"{manifest[key]['mean_tokens']:.1f}",
        ]
        for what, key in (("read", "read"), ("right", "right"), ("written", "written"))
    ]
    show("\n".join(aligned_table(["", "completions", "prompts", "mean tokens"], rows)))
    return 0
