//! An expression for paths.
//!
//! The expressions of libselinux are those of PCRE, over bytes, and stand for whole paths. Here the
//! crate `regex` matches them, in time in proportion to their length. What it does not have, or
//! means in another way, is refused: groups that look around, references back, quantifiers that do
//! not give back. What it means in another way within `[]` is protected from it.

use regex::bytes::{Regex, RegexBuilder};

/// The most memory that one expression may take when it is compiled, in bytes.
const SIZE_MAX: usize = 256 << 10;

/// The deepest nesting of groups.
const NEST_MAX: u32 = 50;

/// Letters behind a backslash that mean the same in both.
const COMMON_ESCAPES: &str = "dDsSwWbBntrfaAz0123456789xX";

/// An expression that is compiled.
pub(super) struct PathPattern {
    /// `None` for one that is only its prefix.
    regex: Option<Regex>,
    /// What every path begins with that it fits.
    prefix: Vec<u8>,
}

impl PathPattern {
    /// Compiles `expression`.
    ///
    /// # Errors
    /// What is wrong with it, or not known here.
    pub(super) fn new(expression: &str) -> Result<Self, String> {
        let (prefix, is_exact) = prefix_of(expression);
        if is_exact {
            return Ok(Self { regex: None, prefix });
        }
        let pattern = format!("^(?:{})$", translated(expression)?);
        let regex = RegexBuilder::new(&pattern)
            .unicode(false)
            .dot_matches_new_line(true)
            .size_limit(SIZE_MAX)
            .nest_limit(NEST_MAX)
            .build();
        let regex = regex.map_err(|error| match error {
            regex::Error::CompiledTooBig(_) => {
                format!("the expression {expression} takes more than {} KiB", SIZE_MAX >> 10)
            }
            error => {
                // The first lines show the place.
                let text = error.to_string();
                let last = text.lines().last().unwrap_or_default();
                format!("the expression {expression}: {}", last.trim_start_matches("error: "))
            }
        })?;
        Ok(Self { regex: Some(regex), prefix })
    }

    /// Whether only one path fits, the [prefix](Self::prefix).
    pub(super) fn is_exact(&self) -> bool {
        self.regex.is_none()
    }

    /// What every path begins with that it fits.
    pub(super) fn prefix(&self) -> &[u8] {
        &self.prefix
    }

    /// Whether it fits the path.
    pub(super) fn matches(&self, path: &[u8]) -> bool {
        match &self.regex {
            None => self.prefix == path,
            Some(regex) => path.starts_with(&self.prefix) && regex.is_match(path),
        }
    }
}

/// The text before everything that is special in an expression, and whether that is all of it.
fn prefix_of(expression: &str) -> (Vec<u8>, bool) {
    let mut prefix = Vec::new();
    let mut last = 0;
    let mut bytes = expression.bytes();
    while let Some(byte) = bytes.next() {
        let literal = match byte {
            b'\\' => match bytes.next() {
                Some(byte) if !byte.is_ascii_alphanumeric() => byte,
                _ => return (prefix, false),
            },
            b'.' | b'^' | b'$' | b'|' | b'[' | b'(' => return (prefix, false),
            // What stands before it may be missing.
            b'?' | b'*' | b'+' | b'{' => {
                prefix.truncate(last);
                return (prefix, false);
            }
            byte => byte,
        };
        last = prefix.len();
        prefix.push(literal);
    }
    (prefix, true)
}

/// The expression as the crate has it.
fn translated(expression: &str) -> Result<String, String> {
    let refused = |what: &str| Err(format!("the expression {expression} has {what}"));
    let mut translated = String::with_capacity(expression.len());
    let mut letters = expression.chars().peekable();
    let (mut depth, mut is_quantified) = (0_u32, false);
    while let Some(letter) = letters.next() {
        let next = letters.peek().copied();
        match letter {
            '\\' => {
                let Some(escaped) = letters.next() else {
                    return refused("nothing behind its last backslash");
                };
                push_escape(&mut translated, escaped)
                    .map_err(|what| format!("the expression {expression} has {what}"))?;
            }
            '[' => {
                let class = translated_class(&mut letters);
                let class =
                    class.map_err(|what| format!("the expression {expression} has {what}"))?;
                translated.push_str(&class);
            }
            '(' if next == Some('?') => {
                letters.next();
                if letters.next() != Some(':') {
                    return refused("a group that begins with `(?`, and only `(?:` is known");
                }
                depth += 1;
                translated.push_str("(?:");
            }
            '(' if next == Some('*') => return refused("a verb `(*`, which is not known"),
            '(' => {
                depth += 1;
                translated.push('(');
            }
            ')' => {
                depth = depth.saturating_sub(1);
                translated.push(')');
            }
            '|' if depth == 0 => {
                return refused(
                    "alternatives outside of parentheses, which libselinux anchors at \
                                one end each",
                );
            }
            '+' if is_quantified => {
                return refused("a quantifier that gives nothing back, which is not known");
            }
            other => translated.push(other),
        }
        is_quantified = matches!(letter, '?' | '*' | '+' | '}');
    }
    Ok(translated)
}

fn push_escape(translated: &mut String, escaped: char) -> Result<(), String> {
    if !escaped.is_ascii_alphanumeric() {
        // `\<` and `\>` are letters of PCRE, and the ends of words for the crate.
        if escaped.is_ascii() && !matches!(escaped, '<' | '>') {
            translated.push('\\');
        }
        translated.push(escaped);
        return Ok(());
    }
    if escaped.is_ascii_digit() {
        return Err(format!("a reference `\\{escaped}`, which is not known"));
    }
    if !COMMON_ESCAPES.contains(escaped) {
        return Err(format!("the escape `\\{escaped}`, which is not known"));
    }
    translated.push('\\');
    translated.push(escaped);
    Ok(())
}

/// A class behind its `[`, with what is special in classes of the crate alone protected.
fn translated_class(
    letters: &mut std::iter::Peekable<std::str::Chars<'_>>,
) -> Result<String, String> {
    let mut class = "[".to_owned();
    if letters.next_if_eq(&'^').is_some() {
        class.push('^');
    }
    // The first one is no end.
    if letters.next_if_eq(&']').is_some() {
        class.push_str("\\]");
    }
    while let Some(letter) = letters.next() {
        match letter {
            ']' => {
                class.push(']');
                return Ok(class);
            }
            '\\' => {
                let escaped = letters.next().ok_or("a `[` without its `]`")?;
                push_escape(&mut class, escaped)?;
            }
            '[' if letters.peek() == Some(&':') => {
                class.push('[');
                for letter in letters.by_ref() {
                    class.push(letter);
                    if letter == ']' {
                        break;
                    }
                }
            }
            '[' if matches!(letters.peek(), Some('.' | '=')) => {
                return Err("a class of classes `[.` or `[=`, which is not known".to_owned());
            }
            '-' if letters.peek() == Some(&'-') => {
                return Err("a range from or to `-`: put a backslash before it".to_owned());
            }
            '[' | '&' | '~' => {
                class.push('\\');
                class.push(letter);
            }
            other => class.push(other),
        }
    }
    Err("a `[` without its `]`".to_owned())
}
