#compdef rlft
# Completion of rlft's words in zsh; made by `rlft completion zsh`.
_rlft() {
    local -a words_found
    words_found=("${(@f)$(PYTHON TAB zsh "${(j: :)words[1,CURRENT-1]} $QIPREFIX$IPREFIX$PREFIX" 2>/dev/null)}")
    # Words that end with a space are whole; after the others typing continues.
    compadd -S '' -- "${(@)words_found:#* }"
    compadd -S ' ' -- "${(@)${(M@)words_found:#* }% }"
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
compdef _rlft rlft
