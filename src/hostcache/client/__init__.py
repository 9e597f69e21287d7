"""What bench and lab share to talk to an OpenAI-compatible server: sender, backpressure, counter scrape."""
