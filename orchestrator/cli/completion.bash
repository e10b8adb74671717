
# Keys and kernels come from caches: compgen -W would run a command in a name.
_cachectl_words() {
  local word
  while IFS= read -r word; do
    [[ $word != "$2"* ]] || printf '%q\n' "$word"
  done < <(cachectl completion --words "$1" 2>/dev/null)
}
_cachectl_layers() { _cachectl_words layers "$1"; }
_cachectl_keys() { _cachectl_words keys "$1"; }
_cachectl_kernels() { _cachectl_words kernels "$1"; }

_cachectl() {
  # bash also splits words at = and :, which keys contain; read removes backslashes.
  local line=${COMP_LINE:0:COMP_POINT} given at word
  read -a given <<<"$line"
  [[ $line == *\\[[:space:]] || $line != *[[:space:]] ]] || given+=("")
  local last=$((${#given[@]} - 1))
  for ((at = 2; at < last; at++)); do
    if [[ ${given[at]} == -- && ${given[1]} =~ ^(run|trace|bench|stage)$ ]]; then
      # A command, else its files.
      COMPREPLY=()
      ((at + 1 < last)) || [[ -z ${given[last]} ]] || mapfile -t COMPREPLY < <(compgen -c -- "${given[last]}")
      compopt -o default 2>/dev/null
      return
    fi
  done
  local COMP_WORDS=() COMP_CWORD
  for word in "${given[@]}"; do
    if [[ $word == --*=* ]]; then COMP_WORDS+=("${word%%=*}" "${word#*=}"); else COMP_WORDS+=("$word"); fi
  done
  COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
  _shtab_cachectl
  # bash replaces what follows the last = or :.
  printf -v word %q "${COMP_WORDS[COMP_CWORD]}"
  if [[ $word == *[=:]* ]]; then COMPREPLY=("${COMPREPLY[@]#"${word%"${word##*[=:]}"}"}"); fi
}

complete -o bashdefault -F _cachectl cachectl
