# SPDX-License-Identifier: Apache-2.0
"""docker-compose.yml and the images of deploy/ on a real Docker engine, with images of our own builds."""
