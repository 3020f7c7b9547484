"""What is measured: this server, Redis, beanstalkd."""
