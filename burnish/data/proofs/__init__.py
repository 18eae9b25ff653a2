"""Formal proofs of propositional logic: the checking kernel, and the prover that finds proofs for generated theorems."""
