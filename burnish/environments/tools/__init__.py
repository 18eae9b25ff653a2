"""Tools that a model may call: the contract, built-in tools, and the formats in which models write calls."""
