"""The mathematics; torch begins here."""
