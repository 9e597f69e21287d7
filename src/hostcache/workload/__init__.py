"""What the agents say: a corpus of real code and the loop that turns it into turns. Sends nothing, measures nothing."""
