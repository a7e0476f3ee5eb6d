"""Jobs: they compose configuration, actors and loops. No tensor code here."""
