
# Keys and kernels come from caches: in a list of _arguments a command in a name would run.
_cachectl_words() {
  local -a found
  found=(${(f)"$(cachectl completion --words $@[-1] 2>/dev/null)"})
  compadd "${@[1,-2]}" -a found
}

_cachectl_line() {
  local at=$words[(i)--]
  if (( at < CURRENT )) && [[ $words[2] == (run|trace|bench|stage) ]]; then
    shift $at words
    (( CURRENT -= at ))
    _normal
  else
    _shtab_cachectl
  fi
}

if [[ $zsh_eval_context[-1] == (eval|file) ]]; then
  compdef _cachectl_line cachectl
else
  _cachectl_line
fi
