"""Measured tables: which rows a database sees, as sorted columns, and the database an operator queries."""
