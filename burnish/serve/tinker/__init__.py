"""The training API of Tinker (thinkingmachines.ai), so that the stock `tinker` client trains and samples on this machine."""
