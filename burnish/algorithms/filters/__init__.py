"""Slot `filters`: group filters, sample filters and resamplers."""
