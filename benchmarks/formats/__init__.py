"""Storage formats of bases and adapters, measured."""
