"""What chaos is made of: the order takers, the workers, a receiver and a database in trouble, and the judge."""
