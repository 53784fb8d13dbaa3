"""The worker of one rank: runs plans on one device. Makes no scheduling decisions."""
