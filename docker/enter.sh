#!/bin/sh
# What a container of docker/*.Dockerfile does: `worker POOL` works for a pool, `deploy` registers pools and deployments,
# `prefect ...` is a single run that a Docker or Kubernetes worker has started. These first bring the project's code to
# POLYTURN_ROOT; anything else is run as it stands.
set -eu

checkout() {
  : "${POLYTURN_REPOSITORY:?the git address of the project}"
  mkdir -p "$POLYTURN_ROOT"
  exec 9>"$POLYTURN_ROOT.lock" # containers may share the volume
  flock 9
  if [ ! -d "$POLYTURN_ROOT/.git" ]; then
    git clone --quiet "$POLYTURN_REPOSITORY" "$POLYTURN_ROOT"
  fi
  git -C "$POLYTURN_ROOT" fetch --quiet --all
  git -C "$POLYTURN_ROOT" checkout --quiet --detach "origin/${POLYTURN_BRANCH:-main}"
  exec 9>&-
  cd "$POLYTURN_ROOT"
}

python=$(command -v python3 || command -v python)
case "${1:-}" in
  worker)
    checkout
    exec "$python" scripts/services.py worker --pool "${2:?the work pool}"
    ;;
  deploy)
    checkout
    exec "$python" scripts/services.py deploy
    ;;
  prefect)
    checkout
    exec "$@"
    ;;
  *)
    exec "$@"
    ;;
esac
