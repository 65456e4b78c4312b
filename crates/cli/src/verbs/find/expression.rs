//! The expression of `find`: parses words into a tree.
//!
//! ```text
//! list := or ; or := and ( -o and )* ; and := not ( [-a] not )* ; not := ! not | ( list ) | test |
//! action
//! ```
//!
//! `!` and parentheses may nest at most [`DEPTH_MAX`] deep, which bounds the recursion.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;

use offshoot_vfs::wildcard::Pattern;
use offshoot_vfs::{FileType, Timestamp};

use crate::moments::parse_time;
use crate::permissions::ModeChange;

/// How deep `!` and parentheses may nest.
const DEPTH_MAX: usize = 64;

/// A test of a file, or an action on it. Each evaluates to true or false.
pub(super) enum Expression {
    And(Vec<Expression>),
    Or(Vec<Expression>),
    Not(Box<Expression>),
    Name(Pattern),
    /// A pattern for the path in the volume.
    Path(Pattern),
    Types(Vec<FileType>),
    Size {
        unit: u64,
        count: NumberMatch,
    },
    Empty,
    /// The age: in days, rounded down, or in minutes, compared exactly.
    Age {
        time: Which,
        unit_secs: i64,
        count: NumberMatch,
    },
    /// Modified after this time.
    NewerThan(Timestamp),
    /// Modified after the file at this place.
    Newer(OsString),
    Permissions {
        mode: u32,
        kind: PermissionMatch,
    },
    User(Vec<u8>),
    Group(Vec<u8>),
    Number {
        what: Numbered,
        count: NumberMatch,
    },
    Print,
    Print0,
    Delete,
    Prune,
    /// `-true` and `-false`.
    Always(bool),
}

impl Expression {
    /// Calls `call` for the expression and all its parts, from left to right.
    pub(super) fn visit<'e>(&'e self, call: &mut impl FnMut(&'e Self)) {
        call(self);
        match self {
            Self::And(parts) | Self::Or(parts) => parts.iter().for_each(|part| part.visit(call)),
            Self::Not(part) => part.visit(call),
            _ => {}
        }
    }

    /// Whether `is_such` holds for the expression or one of its parts.
    pub(super) fn has(&self, is_such: impl Fn(&Self) -> bool) -> bool {
        let mut has = false;
        self.visit(&mut |part| has |= is_such(part));
        has
    }
}

/// A number as `N`, `+N` or `-N`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NumberMatch {
    Just(u64),
    More(u64),
    Less(u64),
}

impl NumberMatch {
    /// Whether `number` satisfies the count.
    pub(super) fn is(self, number: u64) -> bool {
        match self {
            Self::Just(wanted) => number == wanted,
            Self::More(wanted) => number > wanted,
            Self::Less(wanted) => number < wanted,
        }
    }
}

/// One of the times of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Which {
    Access,
    Modification,
    Change,
}

/// How permissions are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PermissionMatch {
    Just,
    /// `-MODE`: all of these bits.
    All,
    /// `/MODE`: any of these bits.
    Any,
}

/// A number of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Numbered {
    Uid,
    Gid,
    Links,
    Inode,
}

/// The parsed search: the expression and how far the walk goes.
pub(super) struct Search {
    pub(super) expression: Expression,
    pub(super) min_depth: usize,
    pub(super) max_depth: usize,
    /// The contents of a directory come before the directory.
    pub(super) is_depth_first: bool,
    /// The walk stays in the subvolume of the place.
    pub(super) is_one_filesystem: bool,
}

/// The index of the first word of the expression. The words before it are places.
pub(super) fn beginning(words: &[OsString]) -> usize {
    let is_expression = |word: &OsString| {
        let word = word.as_bytes();
        word.starts_with(b"-") && word.len() > 1 || matches!(word, b"(" | b")" | b"!")
    };
    words.iter().position(is_expression).unwrap_or(words.len())
}

/// Parses the words of an expression.
pub(super) fn parse(words: &[OsString], now: Timestamp) -> Result<Search, String> {
    let mut parser = Parser {
        words,
        at: 0,
        now,
        depth: 0,
        has_action: false,
        min_depth: 0,
        max_depth: usize::MAX,
        is_depth_first: false,
        is_one_filesystem: false,
    };
    let mut expression = if words.is_empty() { Expression::Always(true) } else { parser.or()? };
    if let Some(word) = parser.words.get(parser.at) {
        return Err(format!("{} is not expected there", word.display()));
    }
    let deletes = expression.has(|part| matches!(part, Expression::Delete));
    let prunes = expression.has(|part| matches!(part, Expression::Prune));
    if prunes && deletes && !parser.is_depth_first {
        // As in findutils: `-delete` goes into directories first, so a pruned one would be emptied
        // before it is pruned.
        return Err("-prune does nothing with -delete, which goes into directories first; \
             to go on nevertheless, say -depth"
            .to_owned());
    }
    if !parser.has_action {
        expression = Expression::And(vec![expression, Expression::Print]);
    }
    let Parser { min_depth, max_depth, is_one_filesystem, .. } = parser;
    let is_depth_first = parser.is_depth_first || deletes;
    Ok(Search { expression, min_depth, max_depth, is_depth_first, is_one_filesystem })
}

struct Parser<'w> {
    words: &'w [OsString],
    at: usize,
    now: Timestamp,
    depth: usize,
    has_action: bool,
    min_depth: usize,
    max_depth: usize,
    is_depth_first: bool,
    is_one_filesystem: bool,
}

impl<'w> Parser<'w> {
    fn peek(&self) -> Option<&'w [u8]> {
        self.words.get(self.at).map(|word| word.as_bytes())
    }

    fn takes(&mut self, words: &[&[u8]]) -> bool {
        let is_next = self.peek().is_some_and(|word| words.contains(&word));
        self.at += usize::from(is_next);
        is_next
    }

    fn or(&mut self) -> Result<Expression, String> {
        let mut parts = vec![self.and()?];
        while self.takes(&[b"-o", b"-or"]) {
            parts.push(self.and()?);
        }
        Ok(Expression::Or(parts))
    }

    fn and(&mut self) -> Result<Expression, String> {
        let mut parts = vec![self.not()?];
        loop {
            let is_said = self.takes(&[b"-a", b"-and"]);
            match self.peek() {
                None | Some(b")" | b"-o" | b"-or") if !is_said => break,
                _ => parts.push(self.not()?),
            }
        }
        Ok(Expression::And(parts))
    }

    fn not(&mut self) -> Result<Expression, String> {
        self.depth += 1;
        if self.depth > DEPTH_MAX {
            return Err(format!("! and parentheses nest more than {DEPTH_MAX} deep"));
        }
        let expression = if self.takes(&[b"!", b"-not"]) {
            Expression::Not(Box::new(self.not()?))
        } else if self.takes(&[b"("]) {
            let inside = self.or()?;
            if !self.takes(&[b")"]) {
                return Err("a ) is missing".to_owned());
            }
            inside
        } else {
            self.primary()?
        };
        self.depth -= 1;
        Ok(expression)
    }

    fn primary(&mut self) -> Result<Expression, String> {
        let word = self.peek().ok_or("an expression is missing at the end")?;
        self.at += 1;
        let shown = String::from_utf8_lossy(word).into_owned();
        Ok(match word {
            b"-name" => Expression::Name(Pattern::new(self.value(&shown)?)),
            b"-iname" => Expression::Name(Pattern::ignoring_case(self.value(&shown)?)),
            b"-path" | b"-wholename" => Expression::Path(Pattern::new(self.value(&shown)?)),
            b"-ipath" | b"-iwholename" => {
                Expression::Path(Pattern::ignoring_case(self.value(&shown)?))
            }
            b"-type" => Expression::Types(types(self.value(&shown)?)?),
            b"-size" => size(self.text(&shown)?)?,
            b"-empty" => Expression::Empty,
            b"-mtime" => self.age(&shown, Which::Modification, 86_400)?,
            b"-atime" => self.age(&shown, Which::Access, 86_400)?,
            b"-ctime" => self.age(&shown, Which::Change, 86_400)?,
            b"-mmin" => self.age(&shown, Which::Modification, 60)?,
            b"-amin" => self.age(&shown, Which::Access, 60)?,
            b"-cmin" => self.age(&shown, Which::Change, 60)?,
            b"-newer" => {
                self.value(&shown)?;
                Expression::Newer(self.words[self.at - 1].clone())
            }
            b"-newermt" => {
                let text = self.text(&shown)?;
                Expression::NewerThan(parse_time(text, self.now)?)
            }
            b"-perm" => permissions(self.text(&shown)?)?,
            b"-user" => Expression::User(self.value(&shown)?.to_vec()),
            b"-group" => Expression::Group(self.value(&shown)?.to_vec()),
            b"-uid" => self.number(&shown, Numbered::Uid)?,
            b"-gid" => self.number(&shown, Numbered::Gid)?,
            b"-links" => self.number(&shown, Numbered::Links)?,
            b"-inum" => self.number(&shown, Numbered::Inode)?,
            b"-print" => self.action(Expression::Print),
            b"-print0" => self.action(Expression::Print0),
            b"-delete" => self.action(Expression::Delete),
            b"-prune" => Expression::Prune,
            b"-true" => Expression::Always(true),
            b"-false" => Expression::Always(false),
            b"-depth" | b"-d" => {
                self.is_depth_first = true;
                Expression::Always(true)
            }
            b"-xdev" | b"-mount" => {
                self.is_one_filesystem = true;
                Expression::Always(true)
            }
            b"-maxdepth" => {
                self.max_depth = self.depth_of(&shown)?;
                Expression::Always(true)
            }
            b"-mindepth" => {
                self.min_depth = self.depth_of(&shown)?;
                Expression::Always(true)
            }
            b")" => return Err("there is nothing before )".to_owned()),
            b"-exec" | b"-execdir" | b"-ok" => {
                return Err(format!(
                    "{shown} is not there, because the files are in a volume: use -print0 and xargs -0"
                ));
            }
            _ => return Err(format!("{shown} is no word of an expression; --help shows them")),
        })
    }

    fn action(&mut self, action: Expression) -> Expression {
        self.has_action = true;
        action
    }

    fn value(&mut self, of: &str) -> Result<&'w [u8], String> {
        let value = self.peek().ok_or_else(|| format!("{of} needs something behind it"))?;
        self.at += 1;
        Ok(value)
    }

    fn text(&mut self, of: &str) -> Result<&'w str, String> {
        let value = self.value(of)?;
        std::str::from_utf8(value).map_err(|_| format!("what is behind {of} is no text"))
    }

    fn depth_of(&mut self, of: &str) -> Result<usize, String> {
        self.text(of)?.parse().map_err(|_| format!("{of} needs a number behind it"))
    }

    fn age(&mut self, of: &str, time: Which, unit_secs: i64) -> Result<Expression, String> {
        Ok(Expression::Age { time, unit_secs, count: count(self.text(of)?)? })
    }

    fn number(&mut self, of: &str, what: Numbered) -> Result<Expression, String> {
        Ok(Expression::Number { what, count: count(self.text(of)?)? })
    }
}

fn count(text: &str) -> Result<NumberMatch, String> {
    let (kind, digits): (fn(u64) -> NumberMatch, &str) = match text.as_bytes() {
        [b'+', ..] => (NumberMatch::More, &text[1..]),
        [b'-', ..] => (NumberMatch::Less, &text[1..]),
        _ => (NumberMatch::Just, text),
    };
    let is_number = digits.starts_with(|c: char| c.is_ascii_digit());
    let number = digits.parse().ok().filter(|_| is_number);
    number.map(kind).ok_or_else(|| format!("{text} is no number, +NUMBER or -NUMBER"))
}

fn size(text: &str) -> Result<Expression, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match &text[digits.len()..] {
        "" | "b" => 512,
        "c" => 1,
        "w" => 2,
        "k" => 1 << 10,
        "M" => 1 << 20,
        "G" => 1 << 30,
        "T" => 1 << 40,
        other => {
            return Err(format!(
                "no unit of -size is called {other}; there are c, b, k, M, G and T"
            ));
        }
    };
    Ok(Expression::Size { unit, count: count(digits)? })
}

fn types(text: &[u8]) -> Result<Vec<FileType>, String> {
    let letters = text.split(|&byte| byte == b',').map(|letter| {
        Some(match letter {
            b"b" => FileType::BlockDevice,
            b"c" => FileType::CharDevice,
            b"d" => FileType::Directory,
            b"p" => FileType::Fifo,
            b"f" => FileType::Regular,
            b"l" => FileType::Symlink,
            b"s" => FileType::Socket,
            _ => return None,
        })
    });
    let types: Option<Vec<_>> = letters.collect();
    types.ok_or_else(|| "-type takes b, c, d, p, f, l and s, with commas between them".to_owned())
}

fn permissions(text: &str) -> Result<Expression, String> {
    let (kind, mode) = match text.as_bytes() {
        [b'-', ..] => (PermissionMatch::All, &text[1..]),
        [b'/', ..] => (PermissionMatch::Any, &text[1..]),
        _ => (PermissionMatch::Just, text),
    };
    let mode = ModeChange::parse(mode)?.of(0, false, 0);
    Ok(Expression::Permissions { mode, kind })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Search, String> {
        let words: Vec<OsString> = line.split_whitespace().map(OsString::from).collect();
        parse(&words, Timestamp { secs: 0, nanos: 0 })
    }

    #[test]
    fn what_no_expression_is() {
        for line in [
            "-name",
            "-name a -o",
            "( -name a",
            ")",
            "( )",
            "!",
            "-a -name x",
            "-name x -a",
            "-type x",
            "-type f,",
            "-size 1X",
            "-size x",
            "-mtime ++1",
            "-perm u",
            "-maxdepth -1",
            "-newermt soon",
            "-exec rm",
            "-nothing",
            "-name a -prune -o -delete",
            "x",
        ] {
            assert!(parsed(line).is_err(), "{line}");
        }
        assert!(parsed(&"! ".repeat(1000)).is_err());
    }

    #[test]
    fn places_end_where_the_expression_begins() {
        let words = ["a.img:/x", "b.img", "!", "-name", "x"].map(OsString::from);
        assert_eq!(beginning(&words), 2);
        assert_eq!(beginning(&words[..2]), 2);
        assert!(parse(&words[2..], Timestamp { secs: 0, nanos: 0 }).is_ok());
    }

    #[test]
    fn counts() {
        assert_eq!(count("5"), Ok(NumberMatch::Just(5)));
        assert_eq!(count("+5"), Ok(NumberMatch::More(5)));
        assert!(
            NumberMatch::Less(5).is(4)
                && !NumberMatch::Less(5).is(5)
                && !NumberMatch::More(5).is(5)
        );
    }
}
