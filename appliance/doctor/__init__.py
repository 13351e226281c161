"""What keeps a machine from serving well, and what a report needs."""
