//! Permissions in the form of `chmod`: `755`, `u+x,go-w`, `a=rX`.

/// A change of the permissions of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ModeChange {
    /// Sets these permissions. A directory keeps its set-id bits, unless the number has five digits
    /// or more.
    Exactly { mode: u32, clears_set_id: bool },
    /// Applies the parts one after the other.
    Parts(Vec<ModePart>),
}

/// One part, such as `go-w`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ModePart {
    /// The bits of the named classes `u`, `g`, `o`; `None` if no class is named: then the umask
    /// applies to all of them.
    who: Option<u32>,
    action: Action,
    bits: ModeBits,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Add,
    Remove,
    Set,
}

/// The permissions of a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ModeBits {
    /// Letters of `rwxXst`: the bits for all three classes, and whether `X` is among them.
    Letters { mode: u32, is_x_if_any: bool },
    /// Copies the bits of `u`, `g` or `o`, given by the shift of that class.
    CopyOf(u32),
    /// Exactly these bits, given in octal. The umask does not apply.
    Number(u32),
}

const USER: u32 = 0o4700;
const GROUP: u32 = 0o2070;
const OTHERS: u32 = 0o0007;
const SET_ID: u32 = 0o6000;

impl ModeChange {
    /// Parses a mode.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let usage = || "a mode is up to four octal digits, or as in u+x,go-w".to_owned();
        if text.starts_with(|c: char| c.is_ascii_digit()) {
            let mode = octal(text).ok_or_else(usage)?;
            // As in GNU chmod, `chmod 00755 dir` clears the set-id bits and `chmod 755 dir` keeps
            // them.
            return Ok(Self::Exactly { mode, clears_set_id: text.len() > 4 });
        }
        let mut parts = Vec::new();
        for clause in text.split(',') {
            let actions_at = clause.find(['+', '-', '=']).ok_or_else(usage)?;
            let (people, mut rest) = clause.split_at(actions_at);
            let mut who = (!people.is_empty()).then_some(0);
            for person in people.chars() {
                let bits = match person {
                    'u' => USER,
                    'g' => GROUP,
                    'o' => OTHERS,
                    'a' => USER | GROUP | OTHERS,
                    _ => return Err(usage()),
                };
                // The sticky bit belongs to `a`, not to a single class.
                who = who.map(|who| who | bits | if person == 'a' { 0o1000 } else { 0 });
            }
            while let Some(sign) = rest.chars().next() {
                let action = match sign {
                    '+' => Action::Add,
                    '-' => Action::Remove,
                    _ => Action::Set,
                };
                let end = rest[1..].find(['+', '-', '=']).map_or(rest.len(), |at| at + 1);
                let letters = &rest[1..end];
                let bits = if letters.starts_with(|c: char| c.is_ascii_digit()) {
                    // Digits apply to all classes, and end the clause.
                    let is_alone = people.is_empty() && end == rest.len();
                    octal(letters).filter(|_| is_alone).map(ModeBits::Number)
                } else {
                    ModeBits::parse(letters)
                };
                let bits = bits.ok_or_else(usage)?;
                parts.push(ModePart { who, action, bits });
                rest = &rest[end..];
            }
        }
        Ok(Self::Parts(parts))
    }

    /// The new permissions of a file that has the permissions `old`.
    pub(crate) fn of(&self, old: u32, is_directory: bool, umask: u32) -> u32 {
        match self {
            Self::Exactly { mode, clears_set_id } => {
                let kept = if is_directory && !clears_set_id { old & SET_ID } else { 0 };
                mode | kept
            }
            Self::Parts(parts) => {
                parts.iter().fold(old, |mode, part| part.apply(mode, is_directory, umask))
            }
        }
    }
}

fn octal(digits: &str) -> Option<u32> {
    u32::from_str_radix(digits, 8).ok().filter(|&mode| mode <= 0o7777)
}

impl ModeBits {
    fn parse(letters: &str) -> Option<Self> {
        match letters {
            "u" => return Some(Self::CopyOf(6)),
            "g" => return Some(Self::CopyOf(3)),
            "o" => return Some(Self::CopyOf(0)),
            _ => {}
        }
        let (mut mode, mut is_x_if_any) = (0, false);
        for letter in letters.chars() {
            mode |= match letter {
                'r' => 0o444,
                'w' => 0o222,
                'x' => 0o111,
                's' => SET_ID,
                't' => 0o1000,
                'X' => {
                    is_x_if_any = true;
                    0
                }
                _ => return None,
            };
        }
        Some(Self::Letters { mode, is_x_if_any })
    }
}

impl ModePart {
    fn apply(&self, old: u32, is_directory: bool, umask: u32) -> u32 {
        let all_classes = USER | GROUP | OTHERS | 0o1000;
        let who = self.who.unwrap_or(all_classes);
        let is_number = matches!(self.bits, ModeBits::Number(_));
        let bits = match self.bits {
            ModeBits::Letters { mode, is_x_if_any } => {
                let is_x = is_x_if_any && (is_directory || old & 0o111 != 0);
                mode | if is_x { 0o111 } else { 0 }
            }
            ModeBits::CopyOf(shift) => (old >> shift & 0o7) * 0o111,
            ModeBits::Number(mode) => mode,
        };
        // The sticky bit is set by `+t` and `o+t`, not by `u+t`.
        let sticky = if self.who.is_none_or(|who| who & OTHERS != 0) { 0o1000 } else { 0 };
        let of_umask = if self.who.is_none() && !is_number { umask } else { 0 };
        let bits = bits & (who | sticky) & !of_umask;
        match self.action {
            Action::Add => old | bits,
            Action::Remove => old & !bits,
            Action::Set => {
                // A directory keeps its set-id bits, unless the change names them.
                let kept = if is_directory && !is_number { SET_ID } else { 0 };
                old & !((who | sticky) & !kept) | bits
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::ModeChange;

    #[test]
    fn what_no_mode_is() {
        for text in ["", "8", "77777", "u", "x", "u+q", "+8", "u+7", "+7-1", "u+x,", "u+gx", "z+x"]
        {
            ModeChange::parse(text).expect_err(text);
        }
    }

    #[test]
    fn parts_follow_each_other() {
        for (text, old, new) in [
            ("644", 0o777, 0o644),
            ("u+x", 0o644, 0o744),
            ("go-w,u=rw", 0o777, 0o655),
            ("u=rwx,g=u-w,o=", 0o000, 0o750),
            ("+w", 0o444, 0o644),
            ("a+X", 0o644, 0o644),
            ("a+X", 0o744, 0o755),
            ("u+s,g+s,+t", 0o755, 0o7755),
            ("u=o", 0o705, 0o505),
            ("o+t", 0o755, 0o1755),
            ("u+t", 0o755, 0o755),
            ("u+x,=750", 0o777, 0o750),
            ("+002", 0o640, 0o642),
            ("-022", 0o666, 0o644),
        ] {
            let change = ModeChange::parse(text).expect(text);
            assert_eq!(change.of(old, false, 0o022), new, "{text} of {old:o}");
        }
    }
}
