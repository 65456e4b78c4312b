//! Points in time as text, always in UTC, so that the same volume prints the same.

use std::fmt;

use offshoot_vfs::Timestamp;

/// A point in time in the calendar, as `stat` shows it:
/// `2026-11-20 09:30:00.123456789 +0000`. The alternate form (`{:#}`) is the short one
/// of `ls -l`: `2026-11-20 09:30`.
#[derive(Clone, Copy)]
pub(crate) struct CivilTime(pub(crate) Timestamp);

impl fmt::Display for CivilTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Timestamp { secs, nanos } = self.0;
        let (year, month, day) = civil_date(secs.div_euclid(86_400));
        let second = secs.rem_euclid(86_400);
        let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
        if f.alternate() {
            write!(f, "{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}")
        } else {
            write!(
                f,
                "{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}.{nanos:09} +0000"
            )
        }
    }
}

/// Seconds and nanoseconds as the decimal that JSON consumers and PAX headers read:
/// `1700000000.000000001`, `-0.500000000`.
pub(crate) fn json_time(time: Timestamp) -> String {
    if time.secs < 0 && time.nanos > 0 {
        // One and a half seconds before the epoch is kept as -2 s and +0.5 s.
        let whole = (time.secs + 1).unsigned_abs();
        format!("-{whole}.{:09}", 1_000_000_000 - time.nanos)
    } else {
        format!("{}.{:09}", time.secs, time.nanos)
    }
}

/// The Gregorian date of a day counted from 1970-01-01.
///
/// The calendar repeats every 400 years (146,097 days). Counting years from March puts
/// the leap day at the end of its year, so the months before it have fixed lengths.
fn civil_date(days: i64) -> (i64, i64, i64) {
    // 719,468 days lie between 0000-03-01 and 1970-01-01. 64-bit seconds leave room.
    let days = days + 719_468;
    let era = days.div_euclid(146_097);
    let day_of_era = days.rem_euclid(146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    (era * 400 + year_of_era + i64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(secs: i64, nanos: u32) -> String {
        CivilTime(Timestamp { secs, nanos }).to_string()
    }

    #[test]
    fn calendar() {
        assert_eq!(text(0, 0), "1970-01-01 00:00:00.000000000 +0000");
        assert_eq!(text(-1, 999_999_999), "1969-12-31 23:59:59.999999999 +0000");
        assert_eq!(text(951_782_400, 1), "2000-02-29 00:00:00.000000001 +0000");
        assert_eq!(text(4_107_542_400, 0), "2100-03-01 00:00:00.000000000 +0000");
        assert_eq!(text(1_795_167_000, 0), "2026-11-20 09:30:00.000000000 +0000");
        // The extremes of the field must not overflow.
        let _ = (text(i64::MIN, 0), text(i64::MAX, 0));
    }

    #[test]
    fn decimal_seconds() {
        let decimal = |secs, nanos| json_time(Timestamp { secs, nanos });
        assert_eq!(decimal(1, 5), "1.000000005");
        assert_eq!(decimal(-2, 500_000_000), "-1.500000000");
        assert_eq!(decimal(-1, 500_000_000), "-0.500000000");
        assert_eq!(decimal(-1, 0), "-1.000000000");
    }
}
