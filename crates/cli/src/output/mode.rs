//! Types and permissions as `ls -l` and `stat` write them.

use std::fmt;

use offshoot_vfs::FileType;

/// The ten letters of a mode: `drwxr-sr-x`.
#[derive(Clone, Copy)]
pub(crate) struct ModeLetters(pub(crate) FileType, pub(crate) u32);

impl fmt::Display for ModeLetters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(file_type, mode) = *self;
        let mut letters = [b'-'; 10];
        letters[0] = type_letter(file_type);
        for (at, letter) in letters[1..].iter_mut().enumerate() {
            if mode & (0o400 >> at) != 0 {
                *letter = b"rwx"[at % 3];
            }
        }
        for (bit, at, letter) in [(0o4000, 3, b's'), (0o2000, 6, b's'), (0o1000, 9, b't')] {
            if mode & bit != 0 {
                letters[at] =
                    if letters[at] == b'x' { letter } else { letter.to_ascii_uppercase() };
            }
        }
        letters.iter().try_for_each(|&letter| write!(f, "{}", char::from(letter)))
    }
}

fn type_letter(file_type: FileType) -> u8 {
    match file_type {
        FileType::Regular => b'-',
        FileType::Directory => b'd',
        FileType::Symlink => b'l',
        FileType::CharDevice => b'c',
        FileType::BlockDevice => b'b',
        FileType::Fifo => b'p',
        FileType::Socket => b's',
    }
}

/// The words of `stat` for a type.
pub(crate) fn type_words(file_type: FileType) -> &'static str {
    match file_type {
        FileType::Regular => "regular file",
        FileType::Directory => "directory",
        FileType::Symlink => "symbolic link",
        FileType::CharDevice => "character special file",
        FileType::BlockDevice => "block special file",
        FileType::Fifo => "fifo",
        FileType::Socket => "socket",
    }
}

/// The name of a type in JSON.
pub(crate) fn type_name(file_type: FileType) -> &'static str {
    match file_type {
        FileType::Regular => "file",
        FileType::Directory => "directory",
        FileType::Symlink => "symlink",
        FileType::CharDevice => "char_device",
        FileType::BlockDevice => "block_device",
        FileType::Fifo => "fifo",
        FileType::Socket => "socket",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn letters() {
        for (file_type, mode, text) in [
            (FileType::Directory, 0o755, "drwxr-xr-x"),
            (FileType::Regular, 0o6754, "-rwsr-sr--"),
            (FileType::Regular, 0o6640, "-rwSr-S---"),
            (FileType::Directory, 0o1777, "drwxrwxrwt"),
            (FileType::Directory, 0o1776, "drwxrwxrwT"),
            (FileType::BlockDevice, 0, "b---------"),
        ] {
            assert_eq!(ModeLetters(file_type, mode).to_string(), text);
        }
    }
}
