"""The supervisor process above the driver."""
